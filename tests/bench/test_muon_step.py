"""The muon-step benchmark compares one optimizer in several systems, and nothing else."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import pytest

from bench.errors import BenchError, UnavailableError
from bench.muon_step.job import Equality
from bench.muon_step.planned import (
    FEWEST_MATRICES,
    gpt_shapes,
    least_received,
    moe_shapes,
    plan_of,
    planned_figures,
)
from bench.muon_step.recorded import complaints
from bench.muon_step.results import furthest_from_one, matrix_shapes, require_equality
from bench.muon_step.settings import OURS, PEERS, SETTINGS_FILE, load
from bench.testbed import Testbed, why_unavailable
from tests.bench import muon_step_programs as programs
from tests.support.ranks import run_ranks

TOLERANCE = 0.2  # small matrices of gradients without full rank, in bf16
TINY_BYTES = 2 * 2 * 12 * 64 * 64  # bf16, layers, matrices of a layer
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("emerging_optimizers") is None,
    reason="megatron-core or emerging-optimizers is missing",
)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is missing")


def equality_of(result: dict[str, Any]) -> dict[str, Equality]:
    return {name: Equality.model_validate(one) for name, one in result["equality"].items()}


@pytest.mark.parametrize("mesh", ["two_tier", "flat", "hooked"])
def test_ours_and_torch_train_alike_and_ours_counts_the_least_bytes(mesh: str) -> None:
    options = {"torch_dtensor": {"mesh": mesh}}
    result = run_ranks(
        4, programs.run, timeout=120.0, env=programs.ENV, names=[OURS, "torch_dtensor"], options=options
    )[0]
    equality = equality_of(result)
    require_equality(equality, weights=TOLERANCE, losses=1e-3)
    assert equality["torch_dtensor"].difference > 0, "not the same object twice"
    assert result["facts"]["torch_dtensor"]["mesh"] == {"two_tier": [2, 2], "flat": [4], "hooked": [2]}[mesh]
    counters = result["counters"]
    assert len(counters) == 4 and sum(each["newton_schulz_calls"] for each in counters) == 8
    received = sum(each["received_bytes"] for each in counters)
    assert received == pytest.approx(least_received(TINY_BYTES, shards=2, replicas=2), rel=0.01)
    (one,) = result["rounds"]
    for name in (OURS, "torch_dtensor"):
        # Each is the mean of its slowest rank, over other stretches of the round: neither bounds the other.
        assert one["windows"][name] > 0
        assert one["times"][name] > 0.012, "modelled compute is a part of the step"


@pytest.mark.parametrize(
    "change",
    [{"nesterov": False}, *(pytest.param(each, marks=pytest.mark.full) for each in ({"ns_steps": 4}, {"lr": 0.0026}))],
    ids=lambda each: next(iter(each)),
)
def test_another_optimizer_fails_the_benchmark(change: dict[str, Any]) -> None:
    result = run_ranks(4, programs.run_with_another_torch_muon, timeout=120.0, env=programs.ENV, change=change)[0]
    with pytest.raises(BenchError, match="torch_dtensor changed the weight blocks"):
        require_equality(equality_of(result), weights=TOLERANCE, losses=1e-3)


@needs_megatron
@pytest.mark.parametrize("layout", [True, False])
def test_megatron_trains_alike(layout: bool) -> None:
    options = {"megatron": {"param_layout": layout, "overlap_param_gather": layout}}
    names = [OURS, "megatron"]
    result = run_ranks(
        4, programs.run, timeout=120.0, env=programs.MEGATRON_ENV, flavour="megatron", names=names, options=options
    )[0]
    assert set(result["equality"]) == set(names)
    require_equality(equality_of(result), weights=TOLERANCE, losses=1e-3)
    facts = result["facts"]["megatron"]
    assert facts["reduces_to_owners"] is layout and facts["overlap_param_gather"] is layout
    assert facts["overlap_grad_reduce"] is True
    if layout:
        assert facts["own_matrices"] == 2, "of 8 on 4 ranks"


@needs_deepspeed
@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_trains_alike(stage: int) -> None:
    names, options = [OURS, "deepspeed"], {"deepspeed": {"stage": stage}}
    result = run_ranks(4, programs.run, timeout=200.0, env=programs.ENV, names=names, options=options)[0]
    require_equality(equality_of(result), weights=TOLERANCE, losses=1e-3)
    assert result["facts"]["deepspeed"] == {
        "stage": stage,
        "overlap_comm": True,
        "optimizer": "MuonWithAuxAdam",
        "compiled": False,
    }


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_missing_peer_is_a_sentence_and_not_a_failure() -> None:
    result = run_ranks(4, programs.run, timeout=120.0, env=programs.ENV, names=[OURS, "deepspeed"])[0]
    assert "DeepSpeed is not installed" in result["unavailable"]["deepspeed"]
    assert set(result["rounds"][0]["times"]) == {OURS}
    alone = run_ranks(4, programs.run, timeout=120.0, env=programs.ENV, names=["deepspeed"])[0]
    assert alone["unavailable"] == result["unavailable"] and alone["rounds"] == []


def test_a_run_on_the_testbed_counts_the_link() -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    job = programs.tiny_job([OURS, "torch_dtensor"], nominal_wire_s=None)
    job.size = job.size.model_copy(update={"dim": 128})
    command = [sys.executable, "-m", "bench.muon_step.worker", job.model_dump_json()]
    with Testbed(rate_mbit=None) as testbed:
        result = testbed.run(command, timeout=120.0, show=False)[0].value
    sent = result["rounds"][0]["link_bytes"]
    # In fp32 the gradients of what AdamW trains, all-reduced, and those of the matrices that the other supernode owns;
    # in bf16 the updates of one's own matrices.
    matrices = 2 * 12 * 128 * 128
    expected = 4 * (result["parameters"] - matrices) + 4 * matrices / 2 + 2 * matrices / 2
    assert sent[OURS] == pytest.approx(expected, rel=0.05)
    assert sent["torch_dtensor"] > 0
    assert all(seconds > 0 for seconds in result["rounds"][0]["wire"])


def test_the_window_is_from_the_last_gradient_to_the_first_layer() -> None:
    window, step = run_ranks(1, programs.window_of_a_slow_optimizer, env=programs.ENV)[0]
    assert 0.06 <= window < 0.1
    assert step > 0.06 + 0.06


def test_weights_losses_and_nan_are_held_against_ours() -> None:
    right = Equality(losses=[4.0, 3.9], difference=0.0, parameter="")
    near = Equality(losses=[4.001, 3.9], difference=0.04, parameter="blocks.0.mlp.up")
    require_equality({OURS: right, "peer": near}, weights=0.1, losses=1e-3)
    for wrong in (
        near.model_copy(update={"difference": 0.2}),
        near.model_copy(update={"difference": math.nan}),
        near.model_copy(update={"losses": [4.0, 3.8]}),
        near.model_copy(update={"losses": [4.0, math.nan]}),
    ):
        with pytest.raises(BenchError, match="peer"):
            require_equality({OURS: right, "peer": wrong}, weights=0.1, losses=1e-3)


def test_the_bound_is_that_of_each_rank_summed() -> None:
    for shards, replicas in ((1, 4), (4, 1), (2, 2), (8, 2), (3, 5)):
        ranks = shards * replicas
        of_a_rank = 1000 / shards * ((shards - 1) / ranks + 1 - 1 / ranks)
        assert least_received(1000, shards=shards, replicas=replicas) == pytest.approx(ranks * of_a_rank)


def test_plans_need_the_least_bytes_and_divide_the_work_evenly() -> None:
    figures = planned_figures()
    assert {one.name for one in figures} == {"gpt", "moe"}
    for one in figures:
        assert one.matrices_per_rank >= FEWEST_MATRICES
        assert one.flops_imbalance <= 1.10
        if one.name == "gpt":
            assert one.bytes_vs_lower_bound == pytest.approx(1.0, abs=0.01)
        else:
            assert one.bytes_vs_lower_bound is None


def test_too_few_matrices_are_seen_to_be_uneven() -> None:
    assert plan_of(((1024, 1024),), shards=2, replicas=2, steps=5).flops_imbalance == pytest.approx(4.0)


def test_sets_of_shapes_are_what_they_are_named_for() -> None:
    assert gpt_shapes(layers=2, dim=64) == ((192, 64), (64, 64), (256, 64), (64, 256)) * 2
    shapes = moe_shapes(layers=1, dim=64, experts=8, expert_dim=32)
    assert [shape for shape in shapes if len(shape) == 3] == [(8, 64, 64), (8, 64, 32)]


def test_the_value_furthest_from_one_is_published() -> None:
    assert furthest_from_one([1.0, 0.97, 1.02]) == 0.97


def test_matrices_of_the_benchmark_are_at_least_1024_by_1024() -> None:
    settings = load()
    for run in (settings.full, settings.quick):
        job = programs.tiny_job([OURS], size=run.size)
        shapes = matrix_shapes(job)
        assert len(shapes) == 4 * run.size.layers
        assert all(min(shape) >= 1024 for shape in shapes)


def test_settings_refuse_unknown_keys(tmp_path: Any) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS_FILE.read_text() + "\nsurprise: 1\n")
    with pytest.raises(UnavailableError, match="surprise"):
        load(path)


def test_options_that_were_not_the_best_in_the_sweep_are_named() -> None:
    settings = load()
    assert [each.partition(":")[0] for each in complaints(settings, {})] == [OURS, *PEERS]
    record = {
        name: {"candidates": [{"options": own.options, "step_ms": 100.0, "window_ms": 50.0}]}
        for name, own in settings.variants.items()
    }
    assert complaints(settings, record) == []
    record["megatron"]["candidates"].append({"options": {"bucket_elements": 1}, "step_ms": 102.0, "window_ms": 40.0})
    record["megatron"]["candidates"].append({"options": {"bucket_elements": 2}, "failed": "no"})
    (found,) = complaints(settings, record)
    assert found.startswith("megatron: ") and "window_ms 50" in found
