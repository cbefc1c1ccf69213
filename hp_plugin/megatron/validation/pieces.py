"""Tensors of parameters under the names and at the places that they have in a checkpoint, and compared there.

A piece is a box of a global tensor. Whole tensors are put together from the pieces of the ranks that would write them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints import model_state
from hp_plugin.megatron.checkpoints.model_state import Source
from hp_plugin.megatron.checkpoints.slices import boxes
from hp_plugin.megatron.releases.differences import unwrapped

_LAYERS = re.compile(r"(^|\.)layers\.(?!\d)")


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter, or of what is laid out like one, as a box of a global tensor.

    Attributes:
        key: Of the global tensor; layers, and experts, may be stacked in it along leading axes.
        shape: Of the global tensor.
        offset: Where the box begins.
        data: The values, in the shape of the box; a view.
        stacked: Number of leading axes that number layers and experts.
        writes: Whether this rank is the one of several with the same piece that writes it.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor
    stacked: int
    writes: bool

    @property
    def name(self) -> str:
        """The parameter's name in the whole model: the key, with the numbers of layer and expert."""
        numbers = list(self.offset[: self.stacked])
        name = self.key
        if numbers and _LAYERS.search(name):
            name = _LAYERS.sub(rf"\g<1>layers.{numbers.pop(0)}.", name, count=1)
        return name + "".join(f"[{number}]" for number in numbers)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same box of another tensor with the global shape."""
        return whole[tuple(slice(low, low + size) for low, size in zip(self.offset, self.data.shape))]


def parameters_of(chunks: Sequence[Any]) -> Iterator[tuple[torch.nn.Parameter, Source]]:
    """The parameters of model chunks, sharded or plain, each once, with their places in a checkpoint."""
    for chunk in map(unwrapped, chunks):
        described = model_state.sharded_state_dict(chunk, dtype=torch.float32)
        for source in model_state.sources(described).values():
            yield source.parameter, source


def pieces(source: Source, values: torch.Tensor) -> list[Piece]:
    """What `values`, of the shape that this rank holds of a parameter, are of global tensors."""
    ndim = len(source.held.shape)
    found = []
    for box in boxes(source.template, source.held, values):
        stacked = len(box.global_shape) - ndim
        writes = not any(box.replica_id)
        found.append(
            Piece(box.key, tuple(box.global_shape), tuple(box.global_offset), box.data, stacked, writes=writes)
        )
    return found


class Whole:
    """Global tensors by key, put together piece by piece; on the device and in the dtype of their first piece."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}

    def add(self, found: Iterable[Piece]) -> None:
        """Put pieces in."""
        for piece in found:
            if piece.key not in self._tensors:
                self._tensors[piece.key] = piece.data.new_zeros(piece.shape)
                self._filled[piece.key] = 0
            piece.of(self._tensors[piece.key]).copy_(piece.data)
            self._filled[piece.key] += piece.data.numel()

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def box(self, piece: Piece) -> torch.Tensor:
        """The elements that `piece` stands for.

        Raises:
            UnsupportedError: The tensor is not there, or has another shape.
        """
        whole = self._tensors.get(piece.key)
        if whole is None or tuple(whole.shape) != piece.shape:
            found = "is missing" if whole is None else f"has shape {tuple(whole.shape)}"
            raise UnsupportedError(
                f"{piece.key} of shape {piece.shape} {found} on one rank, so it cannot be compared; the model must be "
                "the same, layer by layer, whatever its parallelism."
            )
        return piece.of(whole)

    def incomplete(self) -> list[str]:
        """Keys whose elements were not put in exactly once."""
        return [key for key, count in self._filled.items() if count != math.prod(self._tensors[key].shape)]


def gathered(mine: Iterable[Piece]) -> Whole:
    """Whole tensors from the pieces of all ranks, on the host. Every rank must call."""
    written = [
        Piece(p.key, p.shape, p.offset, p.data.detach().cpu().contiguous(), p.stacked, p.writes)
        for p in mine
        if p.writes
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, written)
    whole = Whole()
    for found in everyone:
        whole.add(found)
    return whole


def by_piece(
    chunks: Sequence[Any], values: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> Iterator[tuple[torch.nn.Parameter, list[Piece]]]:
    """For every parameter of `chunks` the pieces of `values`, which may have none for it."""
    for parameter, source in parameters_of(chunks):
        value = values(parameter)
        if value is not None:
            yield parameter, pieces(source, value.detach().view(source.held.local_shape))
