"""With collectives, after backward nothing is alive but shards and their gradients."""

from __future__ import annotations

import pytest

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.faults import cases
from tests.support import run_ranks

SLACK = 4096  # bytes: scalars and the like


def measure(mesh: tuple[int, int], *, reshard: bool, reshard_after_backward: bool = True) -> list[dict[str, int]]:
    return run_ranks(
        mesh[0] * mesh[1],
        cases.memory_after_backward,
        replicate=mesh[0],
        shard=mesh[1],
        env={TRANSPORT_VARIABLE: "c10d"},
        reshard=reshard,
        reshard_after_backward=reshard_after_backward,
    )


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_no_full_tensor_outlives_backward(mesh: tuple[int, int], reshard: bool) -> None:
    for found in measure(mesh, reshard=reshard):
        assert found["gradients"] <= found["live"] <= found["gradients"] + SLACK, found


def test_the_measurement_sees_full_tensors_that_are_kept() -> None:
    for found in measure((1, 2), reshard=True, reshard_after_backward=False):
        assert found["live"] >= found["gradients"] + 0.9 * found["full"], found
