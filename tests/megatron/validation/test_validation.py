"""`--hyperfsdp-mode validation`: jobs that are right are found equal, and faults are found where they are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.cases import BF16_TOLERANCE, FP32_TOLERANCE, tiny_job
from tests.megatron.training import train
from tests.megatron.validation.faults import EP, FAULTS, MOE, PP, SP, TP
from tests.megatron.validation.validated import validate
from tests.support import run_ranks

TIME_LIMIT_S = 240.0
_FULL = pytest.mark.full

CLEAN = [
    pytest.param(2, "", id="dp2", marks=_FULL),
    pytest.param(4, "", id="dp4", marks=_FULL),
    pytest.param(1, "", id="one-rank", marks=_FULL),
    pytest.param(4, f"{SP} --swiglu --normalization RMSNorm", id="sequence-parallel"),
    pytest.param(4, f"{TP} --group-query-attention --num-query-groups 2", id="gqa", marks=_FULL),
    pytest.param(4, "--tensor-model-parallel-size 4 --sequence-parallel", id="tp4", marks=_FULL),
    pytest.param(4, PP, id="pp2", marks=_FULL),
    pytest.param(
        4,
        f"{PP} --num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights",
        id="interleaved",
        marks=_FULL,
    ),
    pytest.param(4, f"{PP} {TP}", id="pp2-tp2", marks=_FULL),
    pytest.param(4, MOE, id="experts", marks=_FULL),
    pytest.param(4, EP, id="ep2", marks=_FULL),
    pytest.param(4, f"{EP} {SP}", id="ep2-sequence-parallel", marks=_FULL),
    pytest.param(4, f"{EP} {PP}", id="ep2-pp2", marks=_FULL),
    pytest.param(4, "--bf16", id="bf16", marks=_FULL),
    pytest.param(4, f"--bf16 {SP} --use-hypermuon", id="bf16-muon-tp", marks=_FULL),
    pytest.param(4, "--use-hypermuon", id="muon", marks=_FULL),
    pytest.param(2, "--calculate-per-token-loss", id="per-token-loss", marks=_FULL),
    pytest.param(
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        id="recompute",
        marks=_FULL,
    ),
    pytest.param(4, f"{SP} --recompute-granularity selective", id="selective-recompute", marks=_FULL),
    pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce", id="distributed-optimizer", marks=_FULL),
    pytest.param(2, "--optimizer sgd --sgd-momentum 0.9", id="sgd", marks=_FULL),
    pytest.param(4, "--hyperfsdp-transport c10d --hyperfsdp-supernode-size 4", id="collectives", marks=_FULL),
]
"""Ranks and arguments."""


def _job(corpus: list[str], job: str, *more: str) -> list[str]:
    shared = tiny_job("--train-iters", "3")
    return [*shared, *corpus, "--use-hyperfsdp", "--hyperfsdp-supernode-size", "2", *job.split(), *more]


def _validated(ranks: int, argv: list[str], *more: str, fault: str | None = None) -> list[dict[str, Any]]:
    argv = [*argv, "--hyperfsdp-mode", "validation", *more]
    return run_ranks(ranks, validate, flavour="megatron", timeout=TIME_LIMIT_S, argv=argv, fault=fault)


@pytest.mark.parametrize(("ranks", "job"), CLEAN)
def test_a_job_that_is_right_equals_one_rank_and_goes_on_as_without(ranks: int, job: str, corpus: list[str]) -> None:
    if ranks == 1:
        job = "--hyperfsdp-supernode-size 1"
    argv = _job(corpus, job)
    found = _validated(ranks, argv, "--hyperfsdp-validation-steps", "2")
    for rank in found:
        assert rank["status"] == 0
        assert len(rank["reports"]) == 2
        for report in rank["reports"]:
            assert report["equal"], report["text"]
            kinds = {comparison["kind"] for comparison in report["comparisons"]}
            assert kinds == {"output", "output_gradient", "input_gradient", "gradient", "weight", "grad_norm", "loss"}
    tolerance = BF16_TOLERANCE if "--bf16" in job else FP32_TOLERANCE  # recording changes the order of a few sums
    plain = run_ranks(ranks, train, flavour="megatron", timeout=TIME_LIMIT_S, argv=argv)
    for rank, without in zip(found, plain, strict=True):
        assert rank["run"].losses == pytest.approx(without.losses, rel=tolerance)
        assert rank["run"].norms == pytest.approx(without.norms, rel=10 * tolerance)
        assert rank["run"].weights.keys() == without.weights.keys()


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=() if name in ("output-unreduced", "divisor") else _FULL) for name in FAULTS],
)
def test_a_fault_is_found_where_it_is(fault: str, corpus: list[str]) -> None:
    put = FAULTS[fault]
    found = _validated(4, _job(corpus, put.job), fault=fault)
    assert all(rank["status"] == 1 for rank in found)
    report = found[0]["reports"][0]
    print(report["text"])
    assert not report["equal"]
    if put.module is not None:
        assert report["location"] == put.module, report["text"]
    wrong = [c for c in report["comparisons"] if not c["error"] <= c["tolerance"]]
    assert put.kind in {comparison["kind"] for comparison in wrong}


@pytest.mark.full
def test_a_job_stops_after_the_validation_where_it_is_asked_to(corpus: list[str]) -> None:
    found = _validated(2, _job(corpus, ""), "--hyperfsdp-validation-then", "stop")
    for rank in found:
        assert rank["status"] == 0
        assert len(rank["reports"]) == 1
        assert not rank["run"].losses
