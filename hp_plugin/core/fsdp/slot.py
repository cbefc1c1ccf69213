"""Where each rank's slice of a parameter lies in the padded full tensor. Pure arithmetic, no tensor is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slot:
    """The slices of one parameter over a shard group.

    Slices follow `torch.chunk`, as DTensor's do: every rank holds `ceil(size / group_size)` entries of `dim`, the last
    ones fewer or none. Collectives want equal operands, so each slice travels in a slot padded to the first's size. On
    dim 0 the padding of a whole parameter is less than `group_size` rows and lies behind its last row.

    Attributes:
        shape: Shape of the full parameter, at least one dim, no dim empty.
        dim: The sharded dim.
        group_size: Number of ranks among which it is split.
    """

    shape: tuple[int, ...]
    dim: int
    group_size: int

    @cached_property
    def chunk(self) -> int:
        """Entries of `dim` in a slot."""
        return math.ceil(self.shape[self.dim] / self.group_size)

    def offset(self, rank: int) -> int:
        """First entry of `dim` that `rank` holds; `shape[dim]` where it holds none."""
        return min(rank * self.chunk, self.shape[self.dim])

    def length(self, rank: int) -> int:
        """Number of entries of `dim` that `rank` holds."""
        return self.offset(rank + 1) - self.offset(rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`, without padding."""
        return (*self.shape[: self.dim], self.length(rank), *self.shape[self.dim + 1 :])

    @cached_property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of a padded slice."""
        return (*self.shape[: self.dim], self.chunk, *self.shape[self.dim + 1 :])

    @cached_property
    def slot_numel(self) -> int:
        """Elements of a padded slice."""
        return math.prod(self.slot_shape)

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all slots."""
        return self.slot_numel * self.group_size

    @cached_property
    def is_even(self) -> bool:
        """Whether no slot has padding."""
        return self.padded_numel == self.numel

    @cached_property
    def is_row_major(self) -> bool:
        """Whether the concatenation of the slots *is* the parameter, so that gathering needs no copy."""
        return self.dim == 0 or self.group_size == 1 or math.prod(self.shape[: self.dim]) == 1


def aligned_offsets(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Start of each of consecutive blocks of `sizes` elements at multiples of `alignment`, and the total length."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += math.ceil(size / alignment) * alignment
    return offsets, end
