"""Layouts for tests: the usual ones by name, and generated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.splits import ColumnSplit, Convolution, GroupedRows, Interleaved, PerHead, RowSplit, Stack

AXES = ("replicate", "shard", "tensor")


def bounded(examples: int) -> settings:
    """Generated tests of this package: always the same examples, as many as fit the time of a test."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def grid(shape: Sequence[int], sizes: tuple[int, int, int], *, shard: int = 0, tensor: int = 1) -> Layout:
    """Replicas x FSDP x TP: `sizes` are R, F and T, `shard` and `tensor` the dims that F and T divide."""
    return Layout(tuple(shape), AXES, sizes, (Replicate(), Shard(shard), Shard(tensor)))


def strided(shape: Sequence[int], sizes: tuple[int, int, int]) -> Layout:
    """FSDP over dim 0 of what TP has cut along dim 0 before, as FSDP2 gives it."""
    factor = sizes[2]
    return Layout(tuple(shape), AXES, sizes, (Replicate(), _StridedShard(0, split_factor=factor), Shard(0)))


def flat(shape: Sequence[int], ranks: int, placement: Placement | None = None) -> Layout:
    """One axis."""
    return Layout(tuple(shape), ("shard",), (ranks,), (placement or Shard(0),))


@dataclass(frozen=True)
class Case:
    """Parameters of a job: their layouts on one mesh, and how they are cut."""

    layouts: tuple[Layout, ...]
    splits: tuple[Split | None, ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [layout.global_shape for layout in self.layouts]


@st.composite
def _parameter(draw: st.DrawFn) -> tuple[tuple[int, ...], Split | None]:
    small = st.integers(1, 7)
    kind = draw(
        st.sampled_from(["matrix", "stack", "convolution", "interleaved", "grouped", "rows", "columns", "heads"])
    )
    m, n, k = draw(small), draw(small), draw(st.integers(1, 3))
    if kind == "stack":
        return (k + 1, m, n), Stack()
    if kind == "convolution":
        rest = draw(st.sampled_from([(1,), (3,), (1, 2), (2, 2), (1, 2, 2)]))
        return (m, n, *rest), Convolution(1)
    if kind == "interleaved":  # grouped-query attention
        return (k * (2 * m + 2), n), Interleaved(k, ("q", "k", "v"), (2 * m, 1, 1))
    if kind == "grouped":
        return ((k + 1) * 2 * m, n), GroupedRows(k + 1, RowSplit(("gate", "up")))
    if kind == "rows":
        return (m + n, k + 1), RowSplit(("a", "b"), (m, n))
    if kind == "columns":
        return (k + 1, m + n), ColumnSplit(("a", "b"), (m, n))
    if kind == "heads":
        return (m + 1, 2 * k), PerHead(2 * k if m % 2 else k, dim=1)
    return (m + 3, n + 1), None


@st.composite
def cases(draw: st.DrawFn, *, max_ranks: int = 8) -> Case:
    """Up to 4 parameters, each placed in its own way on one mesh of up to 3 axes."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        left = max_ranks // max(1, _product(sizes))
        sizes.append(draw(st.integers(1, min(4, left))))
    names = tuple(f"axis_{index}" for index in range(len(sizes)))
    layouts, splits = [], []
    for _ in range(draw(st.integers(1, 4))):
        shape, split = draw(_parameter())
        dims = st.integers(0, 1 if isinstance(split, Convolution) else len(shape) - 1)
        placement = st.one_of(
            st.just(Replicate()),
            dims.map(Shard),
            st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4)),
        )
        placements = tuple(draw(placement) for _ in sizes)
        order = tuple(draw(st.permutations(range(len(sizes)))))
        layouts.append(Layout(shape, names, tuple(sizes), placements, order))
        splits.append(split)
    return Case(tuple(layouts), tuple(splits))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def cube(limit: int) -> Iterator[tuple[int, int, int]]:
    """All (R, F, T) up to a limit."""
    for index in range(limit**3):
        yield index // limit**2 + 1, index // limit % limit + 1, index % limit + 1
