"""Checkpoints of stock Megatron's distributed optimizer, with its optimizer state: read in every layout, and written.

The reference of a resumed job is the run that saved, which went on. Stock itself resumes on CPU with the help of
`stock_distributed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron import training
from tests.megatron.checkpoints import older_release, stock_distributed
from tests.megatron.checkpoints.jobs import (
    DISTRIBUTED,
    HALF,
    INTERLEAVED,
    PP,
    RESHARDABLE,
    TP,
    Layout,
    SavedJobs,
    assert_continues,
    limits_of,
    ours,
    stock,
)
from tests.support.ranks import RanksFailedError

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    return SavedJobs(corpus, tmp_path_factory.mktemp("saved"))


def buckets(ranks: int, arguments: str = "") -> Layout:
    return stock(ranks, f"{DISTRIBUTED} {arguments}")


def model_space(ranks: int, arguments: str = "") -> Layout:
    return stock(ranks, f"{RESHARDABLE} {arguments}")


# Buckets of 20,000 elements: several per buffer, with parameters that fill one alone.
BUCKETED = buckets(4, "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000")
GQA = "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --swiglu"
EP = "--expert-model-parallel-size 2"
UNTIED = "--untie-embeddings-and-output-weights"


def pairs(name: str, shared: str, saver: Layout, loaders: dict[str, Layout], *, small: str = "") -> list[object]:
    """One case for each loader; all but `small` run in `make test-full` only."""
    return [
        pytest.param(shared, saver, loader, id=f"{name}-{to}", marks=[] if to == small else [pytest.mark.full])
        for to, loader in loaders.items()
    ]


PAIRS = [
    *pairs(
        "buckets-dp4",
        "--swiglu",
        BUCKETED,
        {"supernodes-of-2": ours(4, 2), "supernodes-of-4": ours(4, 4), "dp2": ours(2, 1), "dp1": ours(1, 1)},
        small="dp2",
    ),
    *pairs(
        "buckets-tp2",
        GQA,
        buckets(4, f"{TP} --sequence-parallel"),
        {"same": ours(4, 2, f"{TP} --sequence-parallel"), "dp1": ours(2, 2, f"{TP} --sequence-parallel")},
    ),
    *pairs("buckets-pp2", "", buckets(4, PP), {"supernodes-of-2": ours(4, 2, PP), "dp1": ours(2, 2, PP)}),
    *pairs("buckets-interleaved", UNTIED, buckets(4, INTERLEAVED), {"same": ours(4, 2, INTERLEAVED)}),
    *pairs("buckets-bf16", "--bf16", buckets(4), {"dp2": ours(2, 2), "supernodes-of-1": ours(4, 1)}),
    *pairs(
        "model-space-dp4",
        "--swiglu",
        model_space(4),
        {"supernodes-of-2": ours(4, 2), "dp2": ours(2, 2), "tp2": ours(4, 2, TP), "tp2-pp2": ours(4, 4, f"{TP} {PP}")},
    ),
    *pairs(
        "model-space-tp2-pp2",
        GQA,
        model_space(4, f"{TP} {PP}"),
        {"dp4": ours(4, 1), "pp2": ours(4, 2, PP), "interleaved": ours(4, 2, INTERLEAVED)},
    ),
    *pairs("buckets-experts", EXPERTS, buckets(4, EP), {"supernodes-of-2": ours(4, 2, EP), "dp1": ours(2, 2, EP)}),
    *pairs(
        "model-space-experts",
        EXPERTS,
        model_space(4, EP),
        {"supernodes-of-4": ours(4, 4, EP), "without-parallelism": ours(4, 2), "pp2": ours(4, 2, f"{EP} {PP}")},
    ),
    *pairs("model-space-bf16", "--bf16", model_space(2), {"dp4": ours(4, 2), "tp2": ours(2, 2, TP)}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shared", "saver", "loader"), PAIRS)
def test_a_job_goes_on_from_a_checkpoint_of_the_distributed_optimizer(
    jobs: SavedJobs, shared: str, saver: Layout, loader: Layout
) -> None:
    assert_continues(jobs.saved(shared, saver), jobs.resumed(shared, saver, loader), limits=limits_of(shared))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_stock_resumes_its_own_with_the_help_that_the_tests_give_it(jobs: SavedJobs) -> None:
    resumed = jobs.resumed("--swiglu", model_space(4), model_space(2), rank=stock_distributed.train)
    assert_continues(jobs.saved("--swiglu", model_space(4)), resumed)


FROM_OLDER = [
    pytest.param("--swiglu", 2, ours(4, 2), id="supernodes-of-2"),
    pytest.param("--swiglu", 2, ours(4, 1, TP), id="tp2"),
    pytest.param("--swiglu", 1, ours(4, 2, f"{TP} {PP}"), id="tp2-pp2"),
    pytest.param(GQA, 2, ours(2, 2), id="gqa-dp2"),
    pytest.param("--bf16", 2, ours(4, 4), id="bf16"),
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shared", "tensor_parallel", "loader"), FROM_OLDER)
def test_a_job_goes_on_from_the_model_space_of_megatron_0_12(
    jobs: SavedJobs, shared: str, tensor_parallel: int, loader: Layout, tmp_path: Path
) -> None:
    saver = stock(2)
    reference = jobs.saved(shared, saver)
    folder = f"iter_{HALF:07d}"
    older_release.rewrite(jobs.place(shared, saver) / folder, tmp_path / folder, tensor_parallel=tensor_parallel)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(HALF))
    resumed = jobs.run(shared, loader, load=(tmp_path, HALF))
    assert_continues(reference, resumed, limits=limits_of(shared))


OURS = ours(4, 2, DISTRIBUTED)
BACK = [
    pytest.param("--swiglu", model_space(2), stock_distributed.train, id="distributed-dp2"),
    pytest.param("--swiglu", model_space(4, f"{TP} {PP}"), stock_distributed.train, id="distributed-tp2-pp2"),
    pytest.param("--swiglu", stock(2, TP), training.train, id="without-the-flag"),
    pytest.param("--swiglu", ours(2, 2), training.train, id="ours-without-the-flag"),
    pytest.param("--bf16", model_space(4), stock_distributed.train, id="bf16-distributed-dp4"),
    pytest.param("--bf16", ours(4, 4, DISTRIBUTED), training.train, id="bf16-ours"),
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shared", "loader", "rank"), BACK)
def test_a_job_with_the_flag_of_the_distributed_optimizer_saves_what_stock_reads_with_it(
    jobs: SavedJobs, shared: str, loader: Layout, rank: Any
) -> None:
    resumed = jobs.resumed(shared, OURS, loader, rank=rank)
    assert_continues(jobs.saved(shared, OURS), resumed, limits=limits_of(shared))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_buckets_of_another_cut_of_the_model_are_refused_with_advice(jobs: SavedJobs) -> None:
    with pytest.raises(RanksFailedError) as failure:
        jobs.resumed("", buckets(4, PP), ours(4, 2, TP))
    sentence = " ".join(str(failure.value).split())
    assert "dp_reshardable, whose buckets fit one cut of the model only" in sentence
    assert "tensor_model_parallel_size 1 (now 2), pipeline_model_parallel_size 2 (now 1)" in sentence
    assert "--dist-ckpt-optim-fully-reshardable" in sentence and "--no-load-optim" in sentence


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("saver", [BUCKETED, model_space(4)], ids=["buckets", "model-space"])
def test_muon_starts_from_the_distributed_optimizers_adam(jobs: SavedJobs, saver: Layout) -> None:
    reference = jobs.saved("--swiglu", saver)[-1]
    plain = jobs.resumed("--swiglu", stock(2), ours(2, 2, "--use-hypermuon"))[-1]
    started = jobs.resumed("--swiglu", saver, ours(2, 2, "--use-hypermuon"))[-1]
    assert started.losses[HALF + 1] == pytest.approx(reference.losses[HALF + 1], rel=TOLERANCE)
    # Stock DDP has the same weights and moments, so Muon takes the same steps from its checkpoint.
    assert started.losses == pytest.approx(plain.losses, rel=10 * TOLERANCE)
