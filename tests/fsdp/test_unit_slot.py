"""Slot arithmetic against torch.chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.fsdp.slot import Slot, aligned_offsets


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    group_size=st.integers(1, 7),
)
def test_slices_are_those_of_torch_chunk(shape: list[int], dim: int, group_size: int) -> None:
    dim = dim % len(shape)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    slot = Slot(tuple(shape), dim, group_size)
    chunks = list(torch.chunk(full, group_size, dim=dim))
    for rank in range(group_size):
        mine = full.narrow(dim, slot.offset(rank), slot.length(rank))
        assert tuple(mine.shape) == slot.local_shape(rank)
        if rank < len(chunks):
            assert torch.equal(mine, chunks[rank])
        else:
            assert mine.numel() == 0


@given(rows=st.integers(1, 40), columns=st.integers(1, 5), group_size=st.integers(1, 8))
def test_concatenated_slots_of_dim_0_begin_with_the_parameter(rows: int, columns: int, group_size: int) -> None:
    slot = Slot((rows, columns), 0, group_size)
    full = torch.arange(rows * columns).view(rows, columns)
    buffer = torch.full((slot.padded_numel,), -1)
    for rank in range(group_size):
        piece = full.narrow(0, slot.offset(rank), slot.length(rank)).reshape(-1)
        buffer[rank * slot.slot_numel : rank * slot.slot_numel + piece.numel()] = piece
    assert torch.equal(buffer[: slot.numel].view(rows, columns), full)
    assert slot.padded_numel - slot.numel < group_size * columns


@pytest.mark.parametrize(
    ("shape", "dim", "group_size", "row_major"),
    [((4, 6), 0, 2, True), ((4, 6), 1, 2, False), ((1, 6), 1, 2, True), ((4, 6), 1, 1, True)],
)
def test_only_shards_that_concatenate_to_the_parameter_are_row_major(
    shape: tuple[int, ...], dim: int, group_size: int, row_major: bool
) -> None:
    assert Slot(shape, dim, group_size).is_row_major is row_major


def test_aligned_offsets_leave_no_overlap() -> None:
    assert aligned_offsets([3, 32, 33, 0], 32) == ([0, 32, 64, 128], 128)
