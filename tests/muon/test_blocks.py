"""Views and blocks against a mask of the elements that blocks take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.layout import Segment
from hp_plugin.core.muon.blocks import Block, MatrixView, check_blocks, whole
from hp_plugin.errors import ConfigurationError, UnsupportedError


def times_taken(view: MatrixView, blocks: Sequence[Block]) -> torch.Tensor:
    """The naive reference: how many blocks take each element of (depth, rows, cols)."""
    taken = torch.zeros(view.depth, view.rows, view.cols, dtype=torch.int64)
    for block in blocks:
        for row in block.rows:
            for col in block.cols:
                rows, cols = slice(row.start, row.start + row.length), slice(col.start, col.start + col.length)
                taken[block.layer, rows, cols] += 1
    return taken


@st.composite
def segment_lists(draw: st.DrawFn, size: int) -> tuple[Segment, ...]:
    """Ascending segments inside `size`, at least one."""
    bounds = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=4)))
    pairs = [Segment(low, high - low) for low, high in zip(bounds[::2], bounds[1::2])]
    return tuple(pairs)


@st.composite
def views_and_blocks(draw: st.DrawFn) -> tuple[MatrixView, list[Block]]:
    """Blocks that may or may not be disjoint and cover the view."""
    depth = draw(st.integers(1, 2))
    view = MatrixView("stack", depth, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    grid = draw(st.booleans())
    if grid:  # a cover: rows and columns cut at the same places everywhere
        cuts = [sorted({0, size, draw(st.integers(0, size))}) for size in (view.rows, view.cols)]
        rows, cols = ([Segment(a, b - a) for a, b in itertools.pairwise(cut)] for cut in cuts)
        blocks = [Block("b", layer, (r,), (c,)) for layer in range(depth) for r in rows for c in cols]
        drop = draw(st.integers(-1, len(blocks) - 1))
        return view, blocks if drop < 0 else blocks[:drop] + blocks[drop + 1 :]
    blocks = draw(
        st.lists(
            st.builds(
                Block,
                st.just("b"),
                st.integers(0, depth - 1),
                segment_lists(view.rows),
                segment_lists(view.cols),
            ),
            max_size=5,
        )
    )
    return view, blocks


@given(views_and_blocks())
def test_blocks_are_accepted_exactly_if_each_element_is_taken_once(case: tuple[MatrixView, list[Block]]) -> None:
    view, blocks = case
    if bool((times_taken(view, blocks) == 1).all()):
        check_blocks(view, blocks, name="w")
    else:
        with pytest.raises(ConfigurationError, match="of parameter w"):
            check_blocks(view, blocks, name="w")


@pytest.mark.parametrize(
    "rows",
    [
        (Segment(2, 2), Segment(0, 2)),  # not ascending
        (Segment(0, 2), Segment(2, 0), Segment(2, 2)),  # one is empty
        (Segment(0, 5),),  # outside
        (Segment(0, 3), Segment(2, 2)),  # overlap within the block
    ],
)
def test_segments_must_ascend_and_lie_inside(rows: tuple[Segment, ...]) -> None:
    with pytest.raises(ConfigurationError, match="must ascend, lie inside and not be empty"):
        check_blocks(MatrixView("matrix", 1, 4, 2), [Block("q", 0, rows, (Segment(0, 2),))], name="w")


def test_a_block_of_a_matrix_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cut out of matrix 1"):
        check_blocks(MatrixView("matrix", 1, 4, 2), [Block("q", 1, (Segment(0, 4),), (Segment(0, 2),))], name="w")


@pytest.mark.parametrize("same", ["rows", "cols", "neither"])
def test_the_blocks_that_overlap_are_named(same: str) -> None:
    full, low, high = (Segment(0, 4),), (Segment(0, 3),), (Segment(2, 2),)
    first, second = Block("q", 0, low, low), Block("k", 0, high, high)
    if same == "rows":
        first, second = Block("q", 0, full, low), Block("k", 0, full, high)
    elif same == "cols":
        first, second = Block("q", 0, low, full), Block("k", 0, high, full)
    with pytest.raises(ConfigurationError, match="'q' and 'k' of parameter w overlap"):
        check_blocks(MatrixView("matrix", 1, 4, 4), [first, second], name="w")


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((4, 6), None, MatrixView("matrix", 1, 4, 6)),
        ((4, 3, 2, 2), None, MatrixView("convolution", 1, 4, 12)),
        ((4, 3, 2, 2, 2), None, MatrixView("convolution", 1, 4, 24)),
        ((4, 3, 5), "stack", MatrixView("stack", 4, 3, 5)),
        ((4, 3, 5), "convolution", MatrixView("convolution", 1, 4, 15)),
    ],
)
def test_a_shape_is_read_as_matrices(shape: tuple[int, ...], kind: str | None, expected: MatrixView) -> None:
    """A convolution is one matrix of (out, everything else): pytorch/pytorch#166209, where Muon refuses it."""
    view = MatrixView.of(shape, kind)  # type: ignore[arg-type]
    assert view == expected
    check_blocks(view, whole(view), name="w")
    assert [block.shape for block in whole(view)] == [(view.rows, view.cols)] * view.depth


def test_three_dims_without_a_kind_are_refused_with_the_ways_out() -> None:
    with pytest.raises(UnsupportedError, match=r"Stack\(\) or Convolution\(\), or give it to AdamW"):
        MatrixView.of((4, 3, 5))


@pytest.mark.parametrize(("shape", "kind"), [((4,), "matrix"), ((4, 3), "stack"), ((4, 3), "convolution"), ((), None)])
def test_a_kind_that_the_shape_has_not_the_dims_of_is_refused(shape: tuple[int, ...], kind: str | None) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read as a"):
        MatrixView.of(shape, kind)  # type: ignore[arg-type]
