"""How a whole tensor lies on several mesh axes at once: cutting it, and which placements explain what a rank has.

A *placing* is a tuple of placements, one per axis of a `Grid`. By value, `replicate` and `copy` are the same; they
differ in the gradient. Where only values are looked at, `replicate` stands for both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_plugin.core.dtensor.placement import COPY, PARTIAL, REPLICATE, AxisPlacement, shard
from hp_plugin.core.dtensor.plan import placement_on

Placing = tuple[AxisPlacement, ...]


@dataclass(frozen=True)
class Grid:
    """The mesh axes of a plan, and where a rank stands on them.

    Attributes:
        axes: names, in the order of the mesh.
        sizes: ranks along each.
        coordinate: of this rank.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def index(self) -> int:
        """This rank's place in row-major order."""
        index = 0
        for size, at in zip(self.sizes, self.coordinate, strict=True):
            index = index * size + at
        return index

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """All coordinates in row-major order."""
        return list(itertools.product(*(range(size) for size in self.sizes)))

    def at(self, coordinate: tuple[int, ...]) -> Grid:
        """The same grid as another rank sees it."""
        return Grid(self.axes, self.sizes, coordinate)

    def placing(self, placed: Mapping[str, AxisPlacement], ndim: int) -> Placing:
        """What a plan says, for a tensor of `ndim` dims; an axis of one rank does nothing."""
        return tuple(
            REPLICATE if size == 1 else placement_on(placed, axis).resolved(ndim)
            for axis, size in zip(self.axes, self.sizes, strict=True)
        )

    def describe(self, placing: Sequence[AxisPlacement]) -> str:
        """For people: `tp: shard(1)`."""
        named = [f"{a}: {p}" for a, p, size in zip(self.axes, placing, self.sizes, strict=True) if size > 1]
        return ", ".join(named) or "one rank"

    def differing(self, one: Placing, other: Placing) -> str:
        """The axes on which the two differ; all that have several ranks if none does."""
        named = [a for a, p, q in zip(self.axes, one, other, strict=True) if p != q]
        return ", ".join(named or self.divided)

    @property
    def divided(self) -> list[str]:
        """Axes of more than one rank."""
        return [axis for axis, size in zip(self.axes, self.sizes, strict=True) if size > 1]

    def cut(self, whole: torch.Tensor, placing: Placing) -> torch.Tensor:
        """This rank's piece of `whole`; a view where it can be. Axes that do not shard do nothing."""
        for placement, size, at in zip(placing, self.sizes, self.coordinate, strict=True):
            if placement.is_shard and size > 1:
                whole = _piece(whole, placement, size, at)
        return whole

    def fits(self, shape: Sequence[int], placing: Placing) -> bool:
        """Whether the axes divide `shape` as `placing` says."""
        lengths = list(shape)
        for placement, size in zip(placing, self.sizes, strict=True):
            if placement.is_shard and size > 1:
                if placement.dim >= len(lengths) or lengths[placement.dim] % (size * placement.blocks):
                    return False
                lengths[placement.dim] //= size
        return True

    def along(self, placing: Placing, kind: str) -> list[int]:
        """Row-major indices of the ranks that differ from this one only on the axes with placements of `kind`."""
        free = [p.kind == kind and size > 1 for p, size in zip(placing, self.sizes, strict=True)]
        return [
            index
            for index, other in enumerate(self.coordinates)
            if all(f or a == b for f, a, b in zip(free, other, self.coordinate, strict=True))
        ]


def _piece(whole: torch.Tensor, placement: AxisPlacement, size: int, at: int) -> torch.Tensor:
    length = whole.shape[placement.dim] // (size * placement.blocks)
    if placement.blocks == 1:
        return whole.narrow(placement.dim, at * length, length)
    blocks = whole.unflatten(placement.dim, (placement.blocks, size, length)).select(placement.dim + 1, at)
    return blocks.flatten(placement.dim, placement.dim + 1)


def by_value(placing: Placing) -> Placing:
    """The same with `replicate` for `copy`."""
    return tuple(REPLICATE if p == COPY else p for p in placing)


def dual(placing: Placing) -> Placing:
    """Where the gradient lies."""
    return tuple(p.gradient for p in placing)


def with_gradients(placing: Placing, sizes: Sequence[int]) -> list[Placing]:
    """All placings that have the same value: `replicate` may also be `copy`."""
    choices = [(p, COPY) if p == REPLICATE and size > 1 else (p,) for p, size in zip(placing, sizes, strict=True)]
    return [tuple(choice) for choice in itertools.product(*choices)]


def candidates(
    grid: Grid, whole: Sequence[int], local: Sequence[int], hints: Sequence[AxisPlacement] = ()
) -> Iterator[Placing]:
    """Placings, by value, under which a whole tensor of one shape gives every rank the other shape.

    Args:
        grid: the axes.
        whole: shape of the whole tensor.
        local: shape that this rank has.
        hints: shards with blocks that may occur.
    """
    if len(whole) != len(local):
        return
    ratios = []
    for one, other in zip(whole, local, strict=True):
        if one != other and (other == 0 or one % other):
            return
        ratios.append(1 if one == other else one // other)
    choices: list[list[AxisPlacement]] = []
    for size in grid.sizes:
        if size == 1:
            choices.append([REPLICATE])
            continue
        dims = [d for d, ratio in enumerate(ratios) if ratio > 1 or whole[d] == 0]
        blocks = [hint for hint in hints if hint.is_shard and hint.blocks > 1 and hint.dim in dims]
        choices.append([REPLICATE, *(shard(d) for d in dims), *blocks, PARTIAL])
    for placing in itertools.product(*choices):
        ways = [1] * len(whole)
        for placement, size in zip(placing, grid.sizes, strict=True):
            if placement.is_shard and whole[placement.dim]:
                ways[placement.dim] *= size
        if all(way == ratio for way, ratio in zip(ways, ratios, strict=True)) and grid.fits(whole, placing):
            yield placing


def block_candidates(grid: Grid, whole: Sequence[int], local: Sequence[int]) -> Iterator[Placing]:
    """Placings with a shard in blocks on the one axis that divides the one dim, fewest blocks first."""
    for axis, size in enumerate(grid.sizes):
        for dim, (one, other) in enumerate(zip(whole, local, strict=False)):
            if size == 1 or one != other * size or other < 2:
                continue
            for blocks in range(2, other + 1):
                if other % blocks == 0:
                    placing = [REPLICATE] * len(grid.sizes)
                    placing[axis] = shard(dim, blocks=blocks)
                    yield tuple(placing)
