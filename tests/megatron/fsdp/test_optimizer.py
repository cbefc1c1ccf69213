"""Our optimizer on shards against Megatron's own optimizer on whole parameters: norms, zeros, weights, groups."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.megatron import optimized
from tests.support import run_ranks

pytest.importorskip("megatron.core")

from megatron.core.optimizer import OptimizerConfig

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.fsdp.optimizer import build_optimizer
from hp_plugin.megatron.releases import versions


def skip_without(*options: str) -> None:
    """Skip where the release's `OptimizerConfig` has no such field."""
    missing = set(options) - {field.name for field in dataclasses.fields(OptimizerConfig)}
    if missing:
        pytest.skip(f"this release of Megatron has no option {', '.join(sorted(missing))}")


def run(ranks: int, function: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="megatron", timeout=90.0, **kwargs)


CASES = [
    pytest.param(2, 2, {}, {}, 2e-6, id="adamw"),
    pytest.param(2, 1, {"clip_grad": 0.0}, {"tied": False}, 2e-6, id="replicas-untied-without-clipping"),
    pytest.param(2, 2, {}, {"frozen": True}, 2e-6, id="frozen-parameter"),
    pytest.param(2, 2, {"decoupled_weight_decay": False}, {}, 2e-6, id="adam-with-l2"),
    pytest.param(2, 2, {"optimizer": "sgd", "sgd_momentum": 0.9}, {}, 2e-6, id="sgd"),
    pytest.param(2, 2, {"bf16": True}, {"bf16": True}, 1e-4, id="bf16"),
    pytest.param(2, 2, {"bf16": True, "loss_scale": 1024.0}, {"bf16": True}, 1e-4, id="bf16-constant-loss-scale"),
    pytest.param(2, 1, {"fp16": True, "initial_loss_scale": 256.0}, {"fp16": True}, 1e-4, id="fp16"),
    pytest.param(4, 2, {}, {}, 2e-6, id="2x2", marks=pytest.mark.full),
    pytest.param(4, 4, {}, {}, 2e-6, id="1x4-uneven", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("ranks", "supernode_size", "options", "model_options", "tolerance"), CASES)
def test_three_steps_equal_those_of_megatrons_optimizer(ranks, supernode_size, options, model_options, tolerance):
    skip_without(*options)
    results = run(ranks, optimized.compare, supernode_size=supernode_size, options=options, model_options=model_options)
    for found in results:
        print(found)
        assert found["success"] == 1.0
        assert found["steps made"] == optimized.STEPS
        assert found["smallest norm"] > 0.5, "clipping must bite for the test to see it"
        assert found["norm"] < tolerance
        assert found["weight"] < 100 * tolerance
        if tolerance < 1e-5:
            assert found["zeros"] == 0


def test_norms_are_right_beside_tensor_parallelism():
    found = run(
        2,
        optimized.compare,
        supernode_size=2,
        options={},
        parallel={"tensor_parallel": 2},
        model_options={"tensor_model_parallel_size": 2},
    )
    assert all(result["norm"] < 2e-6 and result["zeros"] == 0 for result in found), found


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize(
    ("ranks", "supernode_size", "options", "parallel"),
    [
        pytest.param(2, 2, {}, {"expert_parallel": 2}, id="ep2", marks=pytest.mark.full),
        pytest.param(4, 4, {}, {"expert_parallel": 2}, id="ep2-shards-of-2", marks=pytest.mark.full),
        pytest.param(4, 2, {}, {"expert_parallel": 2}, id="ep2-replicas", marks=pytest.mark.full),
        pytest.param(
            2, 2, {"fp16": True, "loss_scale": 128.0}, {"expert_parallel": 2}, id="ep2-fp16", marks=pytest.mark.full
        ),
    ],
)
def test_experts_on_a_mesh_of_their_own_count_once_in_norms_and_zeros(ranks, supernode_size, options, parallel):
    model_options = {**EXPERTS, "fp16": options.get("fp16", False)}
    tolerance = 1e-4 if options else 2e-6
    for found in run(
        ranks,
        optimized.compare,
        supernode_size=supernode_size,
        options=options,
        parallel=parallel,
        model_options=model_options,
    ):
        print(found)
        assert found["steps made"] == optimized.STEPS
        assert found["smallest norm"] > 0.5, "clipping must bite for the test to see it"
        assert found["norm"] < tolerance
        assert found["weight"] < 100 * tolerance
        assert found["zeros"] == 0 or options


@pytest.mark.skipif(
    versions.series(versions.megatron_version() or "0.19.2") == (0, 16),
    reason="the router of Megatron 0.16 needs Transformer Engine where the model is not in fp32",
)
def test_an_overflow_in_the_experts_alone_lowers_the_one_loss_scale():
    for found in run(2, optimized.overflow_of_experts):
        assert found == {"returned": (False, None, None), "unmoved": True, "scales": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("ranks", "supernode_size", "tensor_parallel"),
    [
        (1, 1, 1),
        (2, 2, 1),
        (2, 1, 1),
        (2, 2, 2),
        pytest.param(4, 2, 1, marks=pytest.mark.full),
        pytest.param(4, 4, 2, marks=pytest.mark.full),
        pytest.param(4, 2, 2, marks=pytest.mark.full),
    ],
)
def test_every_element_of_the_model_counts_once(ranks, supernode_size, tensor_parallel):
    for squared_norm, numel in run(
        ranks, optimized.statistics_are_counted_once, supernode_size=supernode_size, tensor_parallel=tensor_parallel
    ):
        assert squared_norm == pytest.approx(numel, rel=1e-6)


def test_groups_carry_the_options_of_stock():
    for found in run(2, optimized.groups, supernode_size=2):
        assert found == {
            "parameters": True,
            "options": True,
            "number": 3,
            "no stub": True,
            "scale": True,
            "same parameters": True,
            "multipliers": [(0.0, 1e-2), (1.0, 5e-3), (1.0, 1e-2)],
        }


def test_a_norm_beyond_the_threshold_skips_the_update():
    skip_without("grad_norm_skip_threshold")
    assert run(2, optimized.skipped, threshold=1e-3) == [([False] * 3, False)] * 2
    assert run(2, optimized.skipped, threshold=1e3) == [([True] * 3, True)] * 2


def test_an_overflow_lowers_the_scale_and_updates_nothing_on_any_rank():
    for found in run(2, optimized.overflow):
        assert found == {"returned": [(False, None, None)], "unmoved": True, "scale": 0.5}


def test_a_stage_without_parameters_takes_part_in_norm_and_count():
    first, second = run(2, optimized.stage_without_parameters)
    assert first["success"] and second["success"]
    assert first["norm"] == second["norm"] == pytest.approx(first["expected norm"], rel=1e-6)
    assert first["zeros"] == second["zeros"] == first["expected zeros"]


def test_a_step_dispatches_no_dtensor_operation():
    assert run(2, optimized.dispatches_of_a_step) == [0, 0]


def config(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"optimizer": "adam", "use_distributed_optimizer": False, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
    ],
)
def test_other_optimizers_are_refused_by_name(options, message):
    with pytest.raises(UnsupportedError, match=message):
        build_optimizer(lambda *_: None, config(**options), [SimpleNamespace(mesh=None)])
