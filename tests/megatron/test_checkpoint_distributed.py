"""Checkpoints of stock Megatron's distributed optimizer, with its optimizer state: read in every layout, and written.

The reference of a resumed job is the run that saved, which went on. Stock's own resume with the distributed optimizer
needs a fused Adam, which has no CPU build; what it would read is checked tensor by tensor.
"""

from __future__ import annotations

import pytest

from tests.megatron.cases import BF16_TOLERANCE
from tests.megatron.checkpoint_jobs import (
    DISTRIBUTED,
    HALF,
    INTERLEAVED,
    PP,
    RESHARDABLE,
    TP,
    Layout,
    SavedJobs,
    assert_continues,
    ours,
    stock,
)

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
    *pairs("model-space-bf16", "--bf16", model_space(2), {"dp4": ours(4, 2), "tp2": ours(2, 2, TP)}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shared", "saver", "loader"), PAIRS)
def test_a_job_goes_on_from_a_checkpoint_of_the_distributed_optimizer(
    jobs: SavedJobs, shared: str, saver: Layout, loader: Layout
) -> None:
    tolerance = BF16_TOLERANCE if "--bf16" in shared else TOLERANCE
    assert_continues(jobs.saved(shared, saver), jobs.resumed(shared, saver, loader), HALF, tolerance)
