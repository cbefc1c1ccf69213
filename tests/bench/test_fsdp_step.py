"""The fsdp-step benchmark compares like with like: one floor, one arithmetic, peers with their options really on."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from bench.errors import BenchError
from bench.fsdp_step import peers
from bench.fsdp_step.job import Equality
from bench.fsdp_step.model import unit_sizes
from bench.fsdp_step.results import require_equality
from bench.fsdp_step.settings import FLOOR, OURS, OURS_ALIASED, OURS_C10D
from bench.fsdp_step.traffic import expected_bytes
from bench.testbed import Testbed, why_unavailable
from hp_plugin.core.kernels import native_status
from tests.bench import fsdp_step_programs as programs
from tests.support.ranks import run_ranks

TOLERANCE = 2e-6
TORCH_PEERS = ["fsdp2", "fsdp2_tuned", "fsdp2_hook", "torch_ddp"]
MEGATRON_PEERS = ["megatron_ddp", "megatron_distopt", "megatron_fsdp"]
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2_tuned": {
        "reshard_after_forward": False,
        "own_units": True,
        "reduce_scatter_buffers": 2,
        "separate_reduce_scatter_group": True,
        "prefetch": 2,
    },
    "torch_ddp": {"bucket_bytes": 16384},
}
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is missing")


def equality_of(result: dict[str, Any]) -> dict[str, Equality]:
    return {name: Equality.model_validate(one) for name, one in result["equality"].items()}


def run_tiny(names: list[str], compute: str, **kwargs: Any) -> dict[str, Any]:
    results = run_ranks(4, programs.run, timeout=120.0, names=[FLOOR, OURS, *names], compute=compute, **kwargs)
    return dict(results[0])


@pytest.mark.parametrize("compute", ["real", "modelled"])
def test_torch_peers_and_ablations_compute_the_same_and_wait_the_same(compute: str) -> None:
    names = [*TORCH_PEERS, OURS_C10D, OURS_ALIASED, *peers.ABLATIONS]
    if native_status().library is None:
        names.remove(OURS_ALIASED)
    result = run_tiny(names, compute, env=programs.ENV, options=OPTIONS)
    equality = equality_of(result)
    assert set(equality) == {FLOOR, OURS, *names}
    require_equality(equality, tolerance=TOLERANCE, where="test")
    assert equality[FLOOR].norms != equality[OURS].norms, "the floor does not reduce; equal norms would prove nothing"
    if compute == "modelled":
        # 3 layers of attention and MLP, forward and backward; a layer's work is 1 forward and 2 backward
        assert {name: tuple(waits) for name, waits in result["waits"].items()} == dict.fromkeys(equality, (12, 9.0))
    facts = result["facts"]
    assert facts["fsdp2"]["reduce_scatter_group_is_separate"] is False
    assert facts["fsdp2_tuned"]["reduce_scatter_group_is_separate"] is True
    assert facts["fsdp2_tuned"]["units"] == facts["fsdp2"]["units"] + 2
    assert facts["torch_ddp"]["buckets"] > 3
    assert facts["torch_ddp"]["gradient_as_bucket_view"] and facts["torch_ddp"]["static_graph"]
    assert facts[OURS_C10D]["transport"] == facts["no_zero_copy"]["transport"] == "c10d"
    assert facts["no_pipeline"]["transport"] == facts[OURS]["transport"]
    if OURS_ALIASED in names:
        assert facts[OURS_ALIASED]["transport"] == "shm"
    one = result["rounds"]["c1" if compute == "modelled" else "real"][0]
    assert all(seconds > 0 for seconds in one["times"].values())
    assert set(one["host_cpu"]) == set(one["times"])
    assert all(seconds > 0 for seconds in one["host_cpu"].values())


@needs_megatron
@pytest.mark.parametrize("compute", ["real", "modelled"])
def test_megatron_peers_compute_the_same_and_wait_the_same(compute: str) -> None:
    result = run_tiny(MEGATRON_PEERS, compute, env=programs.MEGATRON_ENV, flavour="megatron")
    equality = equality_of(result)
    assert set(equality) == {FLOOR, OURS, *MEGATRON_PEERS}
    require_equality(equality, tolerance=TOLERANCE, where="test")
    if compute == "modelled":
        assert {tuple(waits) for waits in result["waits"].values()} == {(12, 9.0)}


@needs_megatron
def test_megatron_overlaps_gradients_with_backward_and_parameters_with_forward() -> None:
    run_ranks(4, programs.megatron_overlaps, flavour="megatron", env=programs.MEGATRON_ENV, timeout=120.0)


def test_host_cpu_counts_all_threads_of_all_ranks_and_no_waiting() -> None:
    working, waiting = run_ranks(2, programs.host_cpu_of_work)[0]
    assert 0.15 < working < 0.6, "0.1 s on a thread beside the one that waits, on each of 2 ranks"
    assert waiting < 0.05


def test_the_hook_reduces_every_unit_once_and_does_not_wait() -> None:
    run_ranks(4, programs.hook_does_not_wait, env=programs.ENV)


def test_ablations_lack_what_they_are_named_for() -> None:
    found = run_ranks(4, programs.ablation_messages, env=programs.ENV)[0]
    units, parameters = 5, 1 + 3 * 6 + 2
    assert found["hyperfsdp"] == [units, 1]
    assert found["no_zero_copy"] == [units, 1]
    assert found["no_fused_reduce"] == [parameters, 1]
    assert found["no_pipeline"] == [units, 0], "nothing may be left for the end of backward"


def test_packed_collectives_give_what_the_engines_give() -> None:
    run_ranks(2, programs.packing_transport)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_missing_peer_is_a_sentence_and_not_a_failure() -> None:
    result = run_tiny(["deepspeed_zero3"], "modelled", env=programs.ENV)
    assert "DeepSpeed is not installed" in result["unavailable"]["deepspeed_zero3"]
    assert set(result["rounds"]["c1"][0]["times"]) == {FLOOR, OURS}


def test_link_bytes_agree_with_the_closed_forms() -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    import sys

    job = programs.tiny_job([FLOOR, OURS, "fsdp2_hook", "torch_ddp"], compute="modelled")
    job.size = job.size.model_copy(update={"dim": 128})
    command = [sys.executable, "-m", "bench.fsdp_step.worker", job.model_dump_json()]
    with Testbed(rate_mbit=None) as testbed:
        result = testbed.run(command, timeout=120.0, show=False)[0].value
    sent = result["rounds"]["c1"][0]["link_bytes"]
    assert sent[FLOOR] < 20_000
    for name in (OURS, "fsdp2_hook", "torch_ddp"):
        expected = expected_bytes(name, parameters=result["parameters"], supernodes=2, ranks=2)
        assert expected is not None
        assert sent[name] == pytest.approx(expected, rel=0.05), name


def test_closed_forms_of_the_link() -> None:
    for kind, passes in ((OURS, 1.0), ("fsdp2_hook", 1.0), ("torch_ddp", 1.5), ("megatron_distopt", 2.25)):
        assert expected_bytes(kind, parameters=100, supernodes=2, ranks=2) == pytest.approx(400 * passes), kind
    assert expected_bytes(OURS, parameters=100, supernodes=4, ranks=1) == pytest.approx(600)
    assert expected_bytes(OURS, parameters=100, supernodes=1, ranks=4) == 0
    assert expected_bytes(FLOOR, parameters=100, supernodes=2, ranks=2) == 0


def test_another_loss_or_norm_fails_the_benchmark() -> None:
    right = Equality(losses=[4.0, 3.9], norms=[1.0, 1.1])
    require_equality({OURS: right, "peer": right}, tolerance=TOLERANCE, where="test")
    for wrong in (
        Equality(losses=[4.0, 3.9001], norms=[1.0, 1.1]),
        Equality(losses=[4.0, 3.9], norms=[2.0, 1.1]),
        Equality(losses=[4.0, float("nan")], norms=[1.0, 1.1]),
    ):
        with pytest.raises(BenchError, match="peer"):
            require_equality({OURS: right, "peer": wrong}, tolerance=TOLERANCE, where="test")


def test_unit_sizes_cover_the_model() -> None:
    size = programs.tiny_job([], compute="real").size
    block = 2 * 32 + 12 * 32 * 32
    assert unit_sizes(size) == [64 * 32, block, block, block, 64 * 32 + 32]
