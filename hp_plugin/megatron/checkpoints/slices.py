"""Cutting Megatron's sharded tensors down to the rows that one data-parallel rank holds.

Megatron describes a parameter of a checkpoint by a `ShardedTensor` (where the tensor of this tensor- and
pipeline-parallel rank lies in the global one) or, for fused parameters such as the gate and up halves of SwiGLU, by a
`ShardedTensorFactory` that builds several of them. Both assume that the rank holds its whole tensor. Here the same
descriptions are made over *stand-ins*, tensors on the meta device with the full shape, and are then cut to the rows
that the rank really holds:

* A stand-in has no memory, but its views still know their storage offset. So the rows of any view that Megatron made
  of it (`torch.chunk` along dim 0, for instance) can be read back, whatever code made the view.
* Rows are divided as `torch.chunk` does, so shards may be uneven or empty. Megatron's regular grids cannot express
  that; a `ShardedTensor` with `axis_fragmentations=None` can, and what it describes is checked by torch's
  distributed checkpoint (no overlap, no gap) when it is saved.
* Megatron stacks the layers of a model along a new first axis (`prepend_axis_num=1`), which irregular grids do not
  support. The axis is therefore made explicit: the local data of a piece has the shape `(1, rows, ...)`.
  :func:`assemble` undoes it after loading.
* Megatron 0.12 has regular grids only. There the rows are cut further, into pieces of one size that divides all shards.
* A rank without any row takes no part in reading or writing the tensor.

Nothing here communicates, and none of it needs an initialised process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import Layout, Segment
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases.differences import takes_irregular_grids

Template: TypeAlias = Any  # ShardedTensor | ShardedTensorFactory, which have no types
"""A `ShardedTensor` or `ShardedTensorFactory`: what Megatron made of a stand-in, which describes the whole tensor."""


_MOST_PIECES = 256


@dataclass(frozen=True)
class HeldRows:
    """The rows (indices of dim 0) of a parameter that this rank holds, and which of several equal copies it is.

    Attributes:
        shape: Shape of the whole parameter (of this tensor-parallel rank).
        segments: Consecutive rows held, in local order; empty where the shard is empty.
        replica: Index of this rank among the ranks that hold the same rows; replica 0 writes them.
        layout: Where the segments come from; None where one rank holds all rows.
    """

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    replica: int
    layout: Layout | None = None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> HeldRows:
        """The rows of `parameter`, a `DTensor` or a plain tensor (which is held whole, as the only replica).

        Raises:
            UnsupportedError: The parameter is sharded along a dim other than 0, or awaits a reduction.
        """
        if not isinstance(parameter, DTensor):
            rows = (Segment(0, parameter.shape[0]),) if parameter.dim() else ()
            return cls(tuple(parameter.shape), rows, 0)
        layout = Layout.from_dtensor(parameter)
        coordinate = parameter.device_mesh.get_coordinate()
        if coordinate is None:
            raise UnsupportedError(
                f"this rank is not on the mesh {parameter.device_mesh} of a parameter that it holds."
            )
        return cls.from_layout(layout, coordinate)

    @classmethod
    def from_layout(cls, layout: Layout, coordinate: Sequence[int]) -> HeldRows:
        """The rows that the rank at mesh `coordinate` holds under `layout`. Raises as :meth:`of`."""
        if layout.partial_axes or any(dim != 0 for dim in layout.shard_dims):
            raise UnsupportedError(
                f"a parameter with placements {layout.placements} cannot be written to a Megatron checkpoint; "
                "only parameters sharded along dim 0 can."
            )
        replica = 0
        for name, size, index in zip(layout.axis_names, layout.axis_sizes, coordinate):
            if name in layout.replicate_axes:
                replica = replica * size + index
        return cls(layout.global_shape, layout.local_segments(coordinate, 0), replica, layout)

    def unit(self) -> int:
        """The largest number of rows such that the segments of every rank begin and end at multiples of it."""
        if self.layout is None:
            return self.shape[0]
        sizes = [
            size if name in self.layout.shard_axes else 1
            for name, size in zip(self.layout.axis_names, self.layout.axis_sizes)
        ]
        found = self.shape[0]
        for coordinate in itertools.product(*map(range, sizes)):
            for segment in self.layout.local_segments(coordinate, 0):
                found = math.gcd(found, segment.start, segment.length)
        return found

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return (sum(segment.length for segment in self.segments), *self.shape[1:])


@dataclass(frozen=True)
class _Piece:
    """Rows `low` to `high` of a view are rows `local` onwards of the local tensor."""

    low: int
    high: int
    local: int


def stand_in(parameter: torch.Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter on the meta device with the full shape of `parameter`, its Megatron attributes, and `dtype`."""
    full = torch.empty(tuple(parameter.shape), dtype=dtype, device="meta")
    standing = torch.nn.Parameter(full, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not isinstance(value, torch.Tensor):  # gradients and copies of weights are not part of a description
            setattr(standing, name, value)
    return standing


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage that `tensor` is a view of, while that storage lives."""
    return tensor.untyped_storage()._cdata


def whole_template(template: Template, held: HeldRows) -> bool:
    """Whether `template` describes the whole parameter, and not a part that Megatron cut from it beforehand."""
    return tuple(template.data.shape) == held.shape and template.data.storage_offset() == 0


def cut(template: Template, held: HeldRows, local: torch.Tensor, *, prefix: str = "") -> Any:
    """What this rank puts into a sharded state dict for a tensor with the layout of a parameter.

    Args:
        template: Megatron's description of the whole parameter, made over a stand-in.
        held: The rows of the parameter that this rank holds.
        local: The values: shape `held.local_shape`, any dtype. Not copied: loading writes into it.
        prefix: Put before the key, `optimizer.state.exp_avg` for instance; a dot follows it. Optimizer states are
            laid out like their parameter and are described by the same template.

    Returns:
        A `ShardedTensor` over a view of `local` if the rows are one piece of one global tensor; a
        `ShardedTensorFactory` if they are several; a `LocalNonpersistentObject`, which is neither written nor read,
        if there are none. What loading makes of it goes through :func:`assemble`.

    Raises:
        UnsupportedError: Megatron's factory makes something other than runs of rows out of the parameter.
    """
    if tuple(local.shape) != held.local_shape:
        raise ValueError(f"the local tensor has shape {tuple(local.shape)}; its layout says {held.local_shape}.")
    key = f"{prefix}.{template.key}" if prefix else template.key
    parts = _build(template, key, held, local.dtype)
    pieces = [_pieces(rows, held, key) for _, rows in parts]
    count = sum(map(len, pieces))
    if count == 0:
        return LocalNonpersistentObject(local)
    replica_id = _replica_id(template.replica_id, held.replica)
    if count == 1:
        part = next(part for (part, _), found in zip(parts, pieces) if found)
        return _cut_part(part, next(found[0] for found in pieces if found), local, replica_id)
    order = [piece.local for found in pieces for piece in found]
    return ShardedTensorFactory(key, local, _builder(template, held), _merger(order, held.local_shape), replica_id)


def boxes(template: Template, held: HeldRows, local: torch.Tensor) -> list[ShardedTensor]:
    """The rows `held` as boxes of global tensors, their axes in front of the rows explicit; data are views of `local`.

    Only where grids may be irregular. Arguments and errors as of :func:`cut`.
    """
    replica_id = replica_id_of(template, held)
    return [
        _cut_part(part, piece, local, replica_id)
        for part, rows in _build(template, template.key, held, local.dtype)
        for piece in _pieces(rows, held, template.key)
    ]


def replica_id_of(template: Template, held: HeldRows) -> tuple[int, ...]:
    """Megatron's replica id of the whole parameter, for the rows that this rank holds."""
    return _replica_id(template.replica_id, held.replica)


def assemble(loaded: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`loaded`, as a checkpoint delivers it, in the local shape: axes of size 1 that :func:`cut` put in front go away.

    Raises:
        ValueError: The number of elements differs.
    """
    if loaded.numel() != math.prod(shape):
        raise ValueError(f"a checkpoint delivered shape {tuple(loaded.shape)} where {tuple(shape)} was expected.")
    return loaded.reshape(tuple(shape))


def _builder(template: ShardedTensorFactory, held: HeldRows) -> Callable[..., list[ShardedTensor]]:
    def build(key: str, local: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        if flattened_range is not None:
            raise UnsupportedError("flattened ranges (the distributed optimizer's format) cannot be cut into rows.")
        return [
            _cut_part(part, piece, local, replica_id)
            for part, rows in _build(template, key, held, local.dtype)
            for piece in _pieces(rows, held, key)
        ]

    return build


def _merger(order: Sequence[int], shape: tuple[int, ...]) -> Callable[[Any], torch.Tensor]:
    def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
        ordered = [tensor for _, tensor in sorted(zip(order, loaded), key=lambda pair: pair[0])]
        return torch.cat([tensor.reshape(-1, *shape[1:]) for tensor in ordered]).reshape(shape)

    return merge


def _build(template: Template, key: str, held: HeldRows, dtype: torch.dtype) -> list[tuple[ShardedTensor, Segment]]:
    """The global tensors that the whole parameter goes to, each with the rows of the parameter that it takes."""
    if isinstance(template, ShardedTensor):
        full = torch.empty(held.shape, dtype=dtype, device="meta")
        return [(_renamed(template, key, full), Segment(0, held.shape[0]))]
    full = torch.empty(held.shape, dtype=dtype, device="meta")
    built = template.build_fn(key, full, template.replica_id, None)
    return [(part, _rows_of(part, full)) for part in _sharded_tensors(built, key)]


def _sharded_tensors(built: Any, key: str) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedBase):
        built = {key: built}
    for part in nested_values(built):
        if not isinstance(part, ShardedTensor):
            raise UnsupportedError(
                f"the parameter {key} is saved as a {type(part).__name__}, which cannot be cut into rows; "
                "a checkpoint of a data-parallel sharded model needs sharded tensors."
            )
        yield part


def _rows_of(part: ShardedTensor, full: torch.Tensor) -> Segment:
    """The rows of `full` that the view `part.data` covers."""
    view, row = part.data, math.prod(full.shape[1:])
    is_view = view is not None and view.is_meta and storage_key(view) == storage_key(full)
    if not is_view or view.shape[1:] != full.shape[1:] or not view.is_contiguous() or view.storage_offset() % row:
        raise UnsupportedError(
            f"the parameter {part.key} is transformed before it is saved (shape {tuple(full.shape)} becomes "
            f"{None if view is None else tuple(view.shape)}), and only runs of whole rows can be saved from shards."
        )
    return Segment(view.storage_offset() // row, view.shape[0])


def _pieces(rows: Segment, held: HeldRows, key: str) -> list[_Piece]:
    """Where `rows`, those of one view, meet the segments held; positions within the view and the local tensor."""
    found, local = [], 0
    for segment in held.segments:
        low, high = max(rows.start, segment.start), min(rows.start + rows.length, segment.start + segment.length)
        if low < high:
            found.append(_Piece(low - rows.start, high - rows.start, local + low - segment.start))
        local += segment.length
    return found if takes_irregular_grids() else _on_a_grid(found, rows, held, key)


def _on_a_grid(pieces: list[_Piece], rows: Segment, held: HeldRows, key: str) -> list[_Piece]:
    """The same rows in pieces of one size, which is the same on every rank."""
    size = math.gcd(held.unit(), rows.start, rows.length)
    cut = [
        _Piece(low, low + size, piece.local + low - piece.low)
        for piece in pieces
        for low in range(piece.low, piece.high, size)
    ]
    if len(cut) > _MOST_PIECES:
        raise UnsupportedError(
            f"{key} of {held.shape[0]} rows lies on this rank in {len(cut)} runs of {size} rows. Checkpoints of this "
            "release of Megatron are regular grids, and so many pieces would be slow; choose a --hyperfsdp-shard-size "
            "that divides the rows of the model's parameters."
        )
    return cut


def _cut_part(part: ShardedTensor, piece: _Piece, local: torch.Tensor, replica_id: Any) -> ShardedTensor:
    axis = part.prepend_axis_num  # of the rows, in the global tensor
    data = local.narrow(0, piece.local, piece.high - piece.low)
    data = data.view((1,) * axis + tuple(data.shape))
    offset = list(part.global_offset)
    offset[axis] += piece.low
    grid = None
    if not takes_irregular_grids():
        grid = tuple(whole // mine for whole, mine in zip(part.global_shape, data.shape))
    return ShardedTensor(
        key=part.key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=tuple(part.global_shape),
        global_offset=tuple(offset),
        axis_fragmentations=grid,
        replica_id=replica_id,
        prepend_axis_num=0,
        allow_shape_mismatch=part.allow_shape_mismatch,
    )


def _renamed(template: ShardedTensor, key: str, data: torch.Tensor) -> ShardedTensor:
    """A copy with another key and dtype. Not `dataclasses.replace`: it would check data against a regular grid."""
    return ShardedTensor(
        key,
        data,
        data.dtype,
        template.local_shape,
        template.global_shape,
        template.global_offset,
        template.axis_fragmentations,
        template.replica_id,
        template.prepend_axis_num,
        template.allow_shape_mismatch,
    )


def _replica_id(stock: Any, replica: int) -> tuple[int, ...]:
    """Megatron's replica id with the data-parallel rank, its last entry, replaced by the replica of the shard.

    The entries before it say whether a pipeline stage or tensor-parallel rank holds a further copy of the parameter
    (a tied embedding, a norm); exactly one rank ends up with zeros only.
    """
    if not isinstance(stock, tuple):
        raise UnsupportedError(f"Megatron gave the replica id {stock!r}; expected a tuple that ends in the data rank.")
    return (*stock[:-1], replica)
