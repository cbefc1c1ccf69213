"""Rings of gradients: places that follow from sizes alone, sums in rank order, back-pressure, and headers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.transport.shm.ring import ALIGNMENT, RingPlaces, entry_bytes
from tests.support import run_ranks
from tests.transport import ring_ranks

CAPACITY = 64 * 16
SIZES = st.lists(st.integers(1, 16).map(lambda lines: 64 * lines), min_size=1, max_size=60)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


@given(SIZES)
def test_a_place_is_free_once_as_many_entries_are_done_as_it_says_and_not_before(sizes: list[int]) -> None:
    ring = RingPlaces(CAPACITY)
    ranges: list[tuple[int, int]] = []
    done = 0
    for expected_number, nbytes in enumerate(sizes):
        number, start, must_be_done = ring.place(nbytes)
        place = (start, start + nbytes)
        assert number == expected_number
        assert start >= 0
        assert place[1] <= CAPACITY
        assert must_be_done <= number, "no entry waits for itself or for one that comes later"
        in_use = [index for index in range(done, number) if overlap(place, ranges[index])]
        assert must_be_done == (in_use[-1] + 1 if in_use else 0), "enough, and no more"
        done = max(done, must_be_done)
        ranges.append(place)


@given(SIZES)
def test_places_are_alike_for_equal_sizes(sizes: list[int]) -> None:
    one, other = RingPlaces(CAPACITY), RingPlaces(CAPACITY)
    assert [one.place(nbytes) for nbytes in sizes] == [other.place(nbytes) for nbytes in sizes]


def test_entries_that_fill_the_ring_wait_for_the_one_before() -> None:
    ring = RingPlaces(CAPACITY)
    assert [ring.place(CAPACITY) for _ in range(3)] == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]


def test_an_entry_has_a_header_and_operands_at_cache_lines() -> None:
    assert entry_bytes([]) == ALIGNMENT
    assert entry_bytes([1, 64, 65]) == ALIGNMENT * (1 + 1 + 1 + 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("keeps_own", [False, True], ids=["own slices in the ring", "own slices elsewhere"])
def test_sums_are_formed_in_rank_order(ranks: int, keeps_own: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    assert run_ranks(ranks, ring_ranks.sums, dtypes=dtypes, entries=17, keeps_own=keeps_own) == [[]] * ranks


def test_a_slice_that_is_read_elsewhere_is_dropped_when_it_has_been_added() -> None:
    assert run_ranks(2, ring_ranks.own_slices_alive) == [[2, 0]] * 2


def test_a_full_ring_blocks_until_all_peers_are_done() -> None:
    found = run_ranks(2, ring_ranks.press_back)[0]
    assert found["must be done"] == 1
    assert not found["free at first"]
    assert found["blocked for"] >= 0.25
    assert found["free then"]
    assert found["sum"] == [6.0] * 16


F32, BF16 = torch.float32, torch.bfloat16
UNIT = [(0, [8, 8], F32)]


def test_other_units_are_refused_on_both_ranks() -> None:
    first, second = run_ranks(
        2, ring_ranks.mix_up, entries=([*UNIT, (1, [8], F32), (2, [8], F32)], [*UNIT, (2, [8], F32)])
    )
    assert first[0] == second[0] == "runs"
    assert first[1] == (
        "PeerError: in backward, rank 0 reduces gradients of unit unit1 where rank 1 reduces those of unit unit2: all "
        "ranks must run the same units in the same order"
    )
    assert second[1].startswith("PeerError: in backward, rank 1 reduces gradients of unit unit2 where rank 0 reduces ")


@pytest.mark.parametrize(
    "other", [[(0, [8, 9], F32)], [(0, [16], F32)], [(0, [8, 8], BF16)]], ids=["sizes", "number", "dtype"]
)
def test_other_operands_of_the_same_unit_are_refused_on_both_ranks(other: list[ring_ranks.Entry]) -> None:
    for rank, found in enumerate(run_ranks(2, ring_ranks.mix_up, entries=(UNIT, other))):
        assert found[0].startswith(
            f"PeerError: in backward, rank {rank} reduces gradients of unit unit0 where rank "
        ), found
        assert "other parameters of that unit, or in another dtype" in found[0]


def test_entries_that_lie_elsewhere_because_of_their_sizes_are_refused_on_both_ranks() -> None:
    # The second entry of rank 0 does not fit behind the first and starts over; that of rank 1 goes on behind it.
    large, small = (1, [300], F32), (1, [8], F32)
    first, second = run_ranks(2, ring_ranks.mix_up, entries=([large, large], [large, small]))
    assert first[0] == second[0] == "runs"
    assert "unit1 where rank 1 reduces others: all ranks must run the same units" in first[1]
    assert "unit1 where rank 0 reduces others: all ranks must run the same units" in second[1]
