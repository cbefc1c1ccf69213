"""Tensors that a sharding plan has cut, as DCP shall see them: with the shape and the places of the whole tensor.

A rank's part of a whole tensor is a set of boxes: plan and `fully_shard` may both cut one dim, and a plan cuts fused
weights block by block. DCP writes and reads boxes by their offsets in the whole tensor, so a checkpoint holds whole
tensors, whatever cut them, and loads under any other plan or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import AttachedLayout, Layout, Segment, attached_layout, local_tensor


class PlacedTensor(torch.Tensor):
    """A whole tensor of which this rank has some boxes: the few methods that DCP calls, and no operations.

    The boxes are views of the tensor that was given, so that loading fills that one.
    """

    _boxes: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, attached: AttachedLayout) -> PlacedTensor:
        """`tensor`: a rank's part, plain or a DTensor over data-parallel axes, of what `attached` says is cut."""
        local = local_tensor(tensor)
        whole = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(attached.layout.global_shape), dtype=local.dtype, device=local.device
        )
        whole._boxes = {torch.Size(offsets): view for offsets, view in _boxes(tensor, attached)}
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} was called on a part of a tensor that only checkpoints may read and write")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002  # DCP names it so
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, view.shape), TensorProperties.create_from_tensor(view), self.size()
                ),
            )
            for offsets, view in self._boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None  # every item above has one
        return self._boxes[torch.Size(index.offset)]


def placed_state(
    model: nn.Module, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both state dicts with the tensors that a plan has cut as `PlacedTensor`s over the same memory.

    A state of an optimizer is cut as its parameter is, if it has the parameter's shape.
    """
    cut = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        attached = attached_layout(parameter)
        if attached is not None and attached.shard_groups:
            cut[name] = (tuple(local_tensor(parameter).shape), attached)

    def place(name: str, value: Any) -> Any:
        shape, attached = cut.get(name, (None, None))
        if attached is None or not isinstance(value, torch.Tensor) or tuple(local_tensor(value).shape) != shape:
            return value
        return PlacedTensor(value.detach(), attached)

    placed = dict(optimizer_state)
    if "state" in placed:
        placed["state"] = {
            name: {key: place(name, value) for key, value in states.items()} if isinstance(states, Mapping) else states
            for name, states in placed["state"].items()
        }
    return {name: place(name, value) for name, value in model_state.items()}, placed


def _boxes(tensor: torch.Tensor, attached: AttachedLayout) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The offsets in the whole tensor of each box that this rank has, and a view of its values."""
    local = local_tensor(tensor)
    runs = []
    for dim in range(local.ndim):
        outer = attached.layout.local_segments(attached.coordinate, dim)
        inner: Sequence[Segment] = (Segment(0, sum(segment.length for segment in outer)),)
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            assert coordinate is not None
            inner = Layout.from_dtensor(tensor).local_segments(coordinate, dim)
        runs.append(_composed(outer, inner))
    found = []
    for box in itertools.product(*runs):
        view = local
        for dim, (_, start, length) in enumerate(box):
            view = view.narrow(dim, start, length)
        found.append((tuple(offset for offset, _, _ in box), view))
    return found


def _composed(outer: Sequence[Segment], inner: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """Of indices `inner` of the concatenation of `outer`: (index in the whole, index in the local tensor, length)."""
    found = []
    local = 0
    for low, count in inner:
        position = 0
        for start, length in outer:
            first, last = max(low, position), min(low + count, position + length)
            if first < last:
                found.append((start + first - position, local + first - low, last - first))
            position += length
        local += count
    return found
