"""Fifty steps of a transformer: sharded training follows that of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.fsdp.conftest import transport as transport  # a fixture
from tests.muon import ranks
from tests.support import run_ranks

STEPS = 50
LARGEST = 1e-3
"""Relative difference of losses. Gradients are summed in another order, so bits differ from the first step on."""


@functools.cache
def expected(*, nesterov: bool = True) -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ranks.reference_trajectory(steps=STEPS, nesterov=nesterov)
    finally:
        torch.set_num_threads(threads)


def furthest(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True))


def check(mesh: tuple[int, int], options: dict[str, Any]) -> None:
    results = run_ranks(
        mesh[0] * mesh[1],
        ranks.train_trajectory,
        replicate=mesh[0],
        shard=mesh[1],
        steps=STEPS,
        options=options,
        timeout=240.0,
    )
    assert all(losses == results[0] for losses in results)
    assert furthest(results[0], expected()) < LARGEST


def test_the_loss_falls() -> None:
    losses = expected()
    assert losses[-1] < 0.5 * losses[0]


def test_two_shards(transport: str) -> None:
    check((1, 2), {})


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"exchange": "gather"}, {"momentum_placement": "owner"}, {"momentum_kind": "heavy_ball"}],
    ids=str,
)
def test_two_replicas_of_two_shards(options: dict[str, Any]) -> None:
    check((2, 2), options)


def test_a_lost_look_ahead_would_show() -> None:
    assert furthest(expected(nesterov=False), expected()) > 10 * LARGEST
