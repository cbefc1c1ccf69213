"""Wrapper and optimizer under context parallelism against one process: it is data parallelism to parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import context_parallel, optimized
from tests.support import run_ranks

pytest.importorskip("megatron.core")


def run(ranks: int, function: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="megatron", timeout=90.0, **kwargs)


@pytest.mark.parametrize(
    ("ranks", "supernode_size"), [(2, 2), *(pytest.param(4, size, marks=pytest.mark.full) for size in (1, 2, 4))]
)
@pytest.mark.parametrize("per_token", [False, pytest.param(True, marks=pytest.mark.full)], ids=["mean", "sum"])
def test_gradients_are_reduced_over_all_parts_of_the_sequence(ranks: int, supernode_size: int, per_token: bool) -> None:
    for found in run(ranks, context_parallel.gradients, supernode_size=supernode_size, per_token=per_token):
        assert found and all(difference < 2e-6 for difference in found.values()), found


@pytest.mark.full
@pytest.mark.parametrize("supernode_size", [2, 4])
def test_steps_equal_those_of_one_process(supernode_size: int) -> None:
    for found in run(4, context_parallel.steps, supernode_size=supernode_size):
        print(found)
        assert found["smallest norm"] > 0.5, "clipping must bite for the test to see it"
        assert found["norm"] < 2e-6
        assert found["weight"] < 2e-5


@pytest.mark.full
def test_steps_equal_those_of_stock() -> None:
    for found in run(
        4, optimized.compare, supernode_size=2, options={}, parallel={"context_parallel": 2}, model_options={}
    ):
        assert found["steps made"] == optimized.STEPS
        assert found["norm"] < 2e-6
        assert found["weight"] < 2e-4
        assert found["zeros"] == 0


@pytest.mark.full
def test_the_mesh_has_the_ranks_of_data_and_context_parallelism() -> None:
    assert run(4, context_parallel.mesh, supernode_size=2) == [([[0, 1], [2, 3]], 2)] * 4
