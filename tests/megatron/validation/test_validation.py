"""`--hyperfsdp-mode validation`: jobs that are right equal one rank, and go on as without. Faults: `test_mutations`."""

from __future__ import annotations

import pytest

from tests.megatron.cases import BF16_TOLERANCE, FP32_TOLERANCE
from tests.megatron.training import train
from tests.megatron.validation.faults import EP, MOE, PP, SP, TP
from tests.megatron.validation.validated import TIME_LIMIT_S, job_arguments, run_validated
from tests.support import run_ranks

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


@pytest.mark.parametrize(("ranks", "job"), CLEAN)
def test_a_job_that_is_right_equals_one_rank_and_goes_on_as_without(ranks: int, job: str, corpus: list[str]) -> None:
    if ranks == 1:
        job = "--hyperfsdp-supernode-size 1"
    argv = job_arguments(corpus, job)
    found = run_validated(ranks, argv, "--hyperfsdp-validation-steps", "2")
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
        for name, weight in without.weights.items():
            difference = (rank["run"].weights[name] - weight).norm() / weight.norm()
            assert difference < (1e-2 if "--bf16" in job else 1e-5), name


@pytest.mark.full
def test_a_job_stops_after_the_validation_where_it_is_asked_to(corpus: list[str]) -> None:
    found = run_validated(2, job_arguments(corpus, ""), "--hyperfsdp-validation-then", "stop")
    for rank in found:
        assert rank["status"] == 0
        assert len(rank["reports"]) == 2
        assert set(rank["run"].losses) <= {1}
