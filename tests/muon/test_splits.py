"""Split descriptors against index arithmetic on real tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.muon.blocks import Block, MatrixView, Split
from hp_plugin.core.muon.splits import (
    ColumnSplit,
    Convolution,
    GroupedRows,
    Interleaved,
    Nested,
    PerHead,
    RowSplit,
    Stack,
    Transposed,
    Whole,
    blocks_of,
    nested,
)
from hp_plugin.errors import ConfigurationError, UnsupportedError


def taken(view: MatrixView, block: Block, values: torch.Tensor) -> torch.Tensor:
    """The block's matrix out of a tensor of the parameter's shape."""
    matrix = values[block.layer] if view.kind == "stack" else values.flatten(1)
    rows, cols = (
        torch.cat([torch.arange(start, start + length) for start, length in segments])
        for segments in (block.rows, block.cols)
    )
    return matrix[rows][:, cols]


def cut(shape: Sequence[int], split: Split) -> dict[str, torch.Tensor]:
    """By name: the matrices that a split makes of a tensor that counts its elements."""
    values = torch.arange(torch.Size(shape).numel()).view(*shape)
    view, blocks = blocks_of("w", shape, split)
    return {block.name: taken(view, block, values) for block in blocks}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, matrix in expected.items():
        assert torch.equal(found[name], matrix), name


def counting(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(*shape)


def test_rows_are_cut_into_ranges() -> None:
    q, k, v = counting(10, 3).split([6, 2, 2])
    assert_same(cut((10, 3), RowSplit(("q", "k", "v"), (6, 2, 2))), {"q": q, "k": k, "v": v})


def test_rows_without_sizes_are_cut_equally() -> None:
    gate, up = counting(8, 3).chunk(2)
    assert_same(cut((8, 3), RowSplit(("gate", "up"))), {"gate": gate, "up": up})


def test_columns_are_cut_for_weights_stored_as_inputs_by_outputs() -> None:
    q, k = counting(3, 10).split([7, 3], dim=1)
    assert_same(cut((3, 10), ColumnSplit(("q", "k"), (7, 3))), {"q": q, "k": k})


def test_interleaved_rows_are_gathered_from_all_groups() -> None:
    groups = counting(2 * 5, 3).view(2, 5, 3)
    expected = {"a": groups[:, :3].reshape(-1, 3), "b": groups[:, 3:].reshape(-1, 3)}
    assert_same(cut((10, 3), Interleaved(2, ("a", "b"), (3, 2))), expected)


def test_interleaved_columns_are_gathered_from_all_groups() -> None:
    """Gate and up alternate column by column in gpt-oss, whose experts are (experts, inputs, outputs)."""
    values = counting(2, 3, 8)
    expected = {f"expert{e}.{n}": values[e][:, i::2] for i, n in enumerate(["gate", "up"]) for e in (0, 1)}
    found = cut((2, 3, 8), Stack(Interleaved(4, ("gate", "up"), (1, 1), dim=1)))
    assert_same(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("dim", [0, 1])
def test_heads_are_matrices_of_their_own(dim: int) -> None:
    shape = (12, 4) if dim == 0 else (4, 12)
    heads = counting(*shape).chunk(3, dim)
    assert_same(cut(shape, PerHead(3, dim)), {f"head{i}": head for i, head in enumerate(heads)})


def test_grouped_experts_are_cut_and_cut_again() -> None:
    values = counting(3 * 4, 5).view(3, 2, 2, 5)
    expected = {f"expert{e}.{n}": values[e, i] for e in range(3) for i, n in enumerate(["gate", "up"])}
    assert_same(cut((12, 5), GroupedRows(3, RowSplit(("gate", "up")))), expected)


def test_stacked_experts_are_cut_and_cut_again() -> None:
    values = counting(3, 4, 5)
    assert_same(cut((3, 4, 5), Stack()), {f"expert{e}": values[e] for e in range(3)})
    expected = {f"expert{e}.{n}": values[e].chunk(2)[i] for e in range(3) for i, n in enumerate(["gate", "up"])}
    assert_same(cut((3, 4, 5), Stack(RowSplit(("gate", "up")))), expected)


def test_convolutions_are_flattened_per_group() -> None:
    """pytorch/pytorch#166209: Muon for convolutions, as (out, in * kernel)."""
    values = counting(6, 2, 3, 3)
    assert_same(cut((6, 2, 3, 3), Convolution()), {"": values.flatten(1)})
    first, second = values.flatten(1).chunk(2)
    assert_same(cut((6, 2, 3, 3), Convolution(2)), {"group0": first, "group1": second})
    assert_same(cut((6, 2, 3), Convolution()), {"": counting(6, 2, 3).flatten(1)})


def test_a_nested_split_cuts_the_blocks_it_names() -> None:
    """Heads of interleaved queries: head h of group g is a range of the parameter's rows."""
    groups = counting(2 * 6, 3).view(2, 6, 3)  # per group: two query heads of 2 rows, one key head of 2
    heads = [groups[g, 2 * h : 2 * h + 2] for g in (0, 1) for h in (0, 1)]
    expected = {f"q.head{i}": head for i, head in enumerate(heads)} | {"k": groups[:, 4:].reshape(-1, 3)}
    assert_same(cut((12, 3), nested(Interleaved(2, ("q", "k"), (4, 2)), q=PerHead(4))), expected)


inner_splits = st.one_of(
    st.builds(Whole),
    st.builds(PerHead, st.integers(1, 3), st.integers(0, 1)),
    st.builds(
        lambda n, dim: (ColumnSplit if dim else RowSplit)(tuple("abc"[:n])), st.integers(1, 3), st.integers(0, 1)
    ),
    st.builds(
        lambda groups, sizes, dim: Interleaved(groups, tuple("abc"[: len(sizes)]), tuple(sizes), dim),
        st.integers(1, 3),
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
        st.integers(0, 1),
    ),
)
any_splits = st.one_of(
    inner_splits,
    st.builds(GroupedRows, st.integers(1, 3), inner_splits, st.integers(0, 1)),
    st.builds(Stack, inner_splits),
    st.builds(Convolution, st.integers(1, 3)),
    st.builds(lambda split: Nested(RowSplit(("x", "y"), (6, 12)), (("y", split),)), inner_splits),
)


@given(any_splits, st.sampled_from([(6, 12), (18, 6), (12, 18), (2, 6, 12), (3, 12, 6), (6, 2, 3, 3)]))
def test_blocks_take_each_element_once_or_the_split_is_refused(split: Split, shape: tuple[int, ...]) -> None:
    try:
        view, blocks = blocks_of("w", shape, split)
    except (ConfigurationError, UnsupportedError):
        return
    values = counting(*shape)
    parts = [taken(view, block, values) for block in blocks]
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == list(range(values.numel()))
    assert [tuple(part.shape) for part in parts] == [block.shape for block in blocks]
    assert len({block.name for block in blocks}) == len(blocks)
    assert (view.kind == "stack") == (len(shape) == 3 and getattr(split, "kind", None) == "stack")


@given(any_splits)
def test_descriptors_are_values(split: Split) -> None:
    again = pickle.loads(pickle.dumps(split))
    assert again == split and hash(again) == hash(split)
    assert eval(repr(split)) == split
    assert str(split)


def test_lists_are_taken_for_tuples() -> None:
    assert RowSplit(["q", "k"], [2, 1]) == RowSplit(("q", "k"), (2, 1))  # type: ignore[arg-type]
    assert hash(Interleaved(2, ["q", "k"], [2, 1])) == hash(Interleaved(2, ("q", "k"), (2, 1)))  # type: ignore[arg-type]


def test_a_split_differs_from_its_column_counterpart() -> None:
    assert RowSplit(("q", "k")) != ColumnSplit(("q", "k"))


def test_sizes_that_do_not_add_up_are_named_with_the_parameter_and_the_way_out() -> None:
    """NVIDIA/Megatron-LM#4731: a gated attention's fused weight was split as if it had no gate."""
    with pytest.raises(ConfigurationError) as error:
        blocks_of("layers.0.linear_qkv.weight", (4608, 8), RowSplit(("q", "k", "v"), (2048, 256, 256)))
    text = str(error.value)
    assert "layers.0.linear_qkv.weight of shape (4608, 8)" in text
    assert "q 2048 + k 256 + v 256 = 2560 rows, but the matrix has 4608" in text
    assert "gated=True" in text


@pytest.mark.parametrize(
    ("shape", "split", "message"),
    [
        ((10, 3), RowSplit(("a", "b", "c")), "10 rows cannot be divided into 3 equal parts"),
        ((10, 3), PerHead(4), "10 rows cannot be divided into 4 equal heads"),
        ((10, 3), PerHead(2, dim=1), "3 columns cannot be divided into 2 equal heads"),
        ((10, 3), GroupedRows(4), "10 rows cannot be divided into 4 equal experts"),
        ((10, 3), GroupedRows(2, PerHead(2)), "5 rows cannot be divided into 2 equal heads"),
        ((10, 3), Stack(), "cannot be read as a stack"),
        ((10, 3), nested(RowSplit(("q", "k")), v=PerHead(1)), r"has no blocks \['v'\]; it has \['q', 'k'\]"),
        ((10, 3, 3, 3), Convolution(4), "10 rows cannot be divided into 4 equal groups"),
    ],
)
def test_splits_that_do_not_fit_are_refused(shape: tuple[int, ...], split: Split, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        blocks_of("w", shape, split)


@pytest.mark.parametrize("split", [None, RowSplit(("q", "k")), PerHead(2), Whole()])
def test_three_dims_need_a_split_that_says_what_they_are(split: Split | None) -> None:
    with pytest.raises(UnsupportedError, match=r"parameter w of shape .* Stack\(\) or Convolution\(\)"):
        blocks_of("w", (2, 4, 4), split)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RowSplit(("q", "q"), (1, 2)),
        lambda: RowSplit(("q", ""), (1, 2)),
        lambda: RowSplit((), ()),
        lambda: RowSplit("qk", (1, 2)),  # type: ignore[arg-type]
        lambda: RowSplit(("q", "k"), (1, 0)),
        lambda: RowSplit(("q", "k"), (1, True)),
        lambda: RowSplit(("q", "k"), (1,)),
        lambda: Interleaved(0, ("q",), (1,)),
        lambda: Interleaved(1, ("q",), (1,), dim=2),
        lambda: PerHead(0),
        lambda: PerHead(2, dim=-1),
        lambda: GroupedRows(0),
        lambda: Convolution(0),
    ],
)
def test_descriptors_that_cannot_be_right_are_refused(make: object) -> None:
    with pytest.raises(ConfigurationError):
        make()  # type: ignore[operator]


def test_a_stack_applies_to_stacks_only() -> None:
    with pytest.raises(ConfigurationError, match="read as a matrix"):
        Stack()(MatrixView("matrix", 1, 2, 2))


def test_a_transposed_weight_is_scaled_by_outputs_over_inputs() -> None:
    (block,) = Transposed()(MatrixView.of((4, 12)))
    assert block.shape == (4, 12)
    assert block.outputs_and_inputs == (12, 4)
    parts = Transposed(ColumnSplit(("q", "k", "v")))(MatrixView.of((4, 12)))
    assert [part.outputs_and_inputs for part in parts] == [(4, 4)] * 3
    stacked = Stack(Transposed(ColumnSplit(("gate", "up"))))(MatrixView.of((2, 4, 12), "stack"))
    assert [part.outputs_and_inputs for part in stacked] == [(6, 4)] * 4
    assert Whole()(MatrixView.of((4, 12)))[0].outputs_and_inputs == (4, 12)
