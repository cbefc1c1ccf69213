"""`deepspeed.initialize` on a model that has an engine already; what is asked of an engine between micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed import again_jobs
from tests.support import run_ranks


@pytest.mark.parametrize(
    ("ranks", "supernode_size"),
    [pytest.param(2, 1), pytest.param(2, 2, marks=pytest.mark.full), pytest.param(4, 2, marks=pytest.mark.full)],
)
@pytest.mark.timeout(400)
def test_gradients_can_be_read_and_dropped_between_micro_batches(ranks: int, supernode_size: int) -> None:
    run_ranks(ranks, again_jobs.gradients_so_far, flavour="deepspeed", timeout=200, supernode_size=supernode_size)


@pytest.mark.timeout(400)
def test_backward_can_leave_the_division_by_micro_batches_out() -> None:
    run_ranks(2, again_jobs.backward_without_division, flavour="deepspeed", timeout=200, supernode_size=2)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_contexts_that_cannot_be_nested_raise_what_deepspeed_raises() -> None:
    run_ranks(2, again_jobs.contexts_in_contexts, flavour="deepspeed", timeout=200, supernode_size=2)


@pytest.mark.parametrize(
    ("ranks", "supernode_size"),
    [pytest.param(2, 1, marks=pytest.mark.full), pytest.param(4, 2, marks=pytest.mark.full)],
)
@pytest.mark.timeout(400)
def test_what_is_trained_may_change_between_micro_batches(ranks: int, supernode_size: int) -> None:
    run_ranks(
        ranks,
        again_jobs.other_parameters_in_every_micro_batch,
        flavour="deepspeed",
        timeout=200,
        supernode_size=supernode_size,
    )


@pytest.mark.parametrize(
    ("ranks", "supernode_size", "has_client", "more"),
    [
        pytest.param(2, 2, False, {}, id="json"),
        pytest.param(4, 2, True, {}, id="client-2x2", marks=pytest.mark.full),
        pytest.param(2, 2, False, {"bf16": {"enabled": True}}, id="bf16", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(400)
def test_a_model_can_get_a_second_engine(
    ranks: int, supernode_size: int, has_client: bool, more: dict[str, Any]
) -> None:
    run_ranks(
        ranks,
        again_jobs.second_engine,
        flavour="deepspeed",
        timeout=200,
        supernode_size=supernode_size,
        has_client=has_client,
        **more,
    )
