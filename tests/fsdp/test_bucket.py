"""Buckets: their composition, and the life of their buffers."""

from __future__ import annotations

import pytest

from hp_plugin.core.fsdp.bucket import compose
from tests.fsdp import kept
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(
    ("sizes", "limit", "counts"),
    [
        ([4, 4, 4], 8, [2, 1]),
        ([4, 4, 4], 7, [1, 1, 1]),
        ([4, 4, 4], 12, [3]),
        ([20, 1, 1, 20], 8, [1, 2, 1]),  # what is larger than a bucket travels alone
        ([4, 4], 0, [1, 1]),
        ([], 8, []),
    ],
)
def test_consecutive_units_share_a_bucket_up_to_its_size(sizes: list[int], limit: int, counts: list[int]) -> None:
    assert compose(sizes, limit) == counts


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_gradient_memory_is_given_back_in_forward_but_not_under_a_gradient_that_is_kept(mesh: tuple[int, int]) -> None:
    for found in run_ranks(mesh[0] * mesh[1], kept.gradients_kept_past_the_step, replicate=mesh[0], shard=mesh[1]):
        assert all(found.values()), found


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_gradient_memory_is_not_given_back_under_a_sum_that_is_to_go_into_it(mesh: tuple[int, int]) -> None:
    fn = kept.gradients_dropped_between_micro_batches
    assert all(run_ranks(mesh[0] * mesh[1], fn, replicate=mesh[0], shard=mesh[1]))


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_gradient_memory_is_given_back_and_used_again_while_the_back_end_holds_a_message(mesh: tuple[int, int]) -> None:
    fn = kept.messages_that_the_back_end_still_holds
    for found in run_ranks(mesh[0] * mesh[1], fn, replicate=mesh[0], shard=mesh[1]):
        assert all(found.values()), found
