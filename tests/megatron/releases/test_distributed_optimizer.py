"""Checkpoints of a release's own distributed optimizer, from its unmodified training script: read, and written.

`fully_sharded_model_space` and `dp_zero_gather_scatter` are what Megatron 0.12 saves. Runs where `MEGATRON_LM_DIR`
names a checkout; see `test_versions`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.cases import BF16_TOLERANCE, FP32_TOLERANCE
from tests.megatron.checkpoints.jobs import (
    DISTRIBUTED,
    PP,
    TP,
    Layout,
    Limits,
    SavedJobs,
    assert_continues,
    ours,
    stock,
)
from tests.megatron.releases import checkout, distributed_jobs
from tests.megatron.training import Run

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(checkout.reason_to_skip() is not None, reason=str(checkout.reason_to_skip())),
    pytest.mark.skipif(
        checkout.reason_to_skip() is None and checkout.series() != (0, 12),
        reason="the formats of 0.12; those of newer releases are in tests/megatron/checkpoints",
    ),
]

# Up to 0.17 NullTokenizer adds a token: 256, which tensor parallelism need not pad further. 0.12 does not find its
# random states in another tensor- and pipeline-parallel layout; nothing here is random.
COMMON = "--vocab-size 255"
NO_RNG = "--no-load-rng"
GATHERED = f"{DISTRIBUTED} --no-ckpt-fully-parallel-save"
EP = "--expert-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --swiglu"
UNEVEN = "--swiglu --ffn-hidden-size 172"
WITHOUT_DECAY = "--swiglu --weight-decay 0"
"""For stock of 0.12 that resumes with pipeline stages: it takes groups in the order in which the first rank saved them,
which differs between stages, so that weights are decayed that should not be (its own checkpoints show the same)."""


class ReleaseJobs(SavedJobs):
    """`SavedJobs` that run the checkout's own training script."""

    common = COMMON
    time_limit_s = 500.0

    def _start(self, layout: Layout, rank: Any, argv: list[str]) -> list[Run]:
        helped = DISTRIBUTED in layout.arguments and "--use-hyperfsdp" not in layout.arguments
        return super()._start(layout, distributed_jobs.train if helped else rank, argv)


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    return ReleaseJobs(corpus, tmp_path_factory.mktemp("saved"), rank=checkout.train)


def pairs(name: str, shared: str, saver: Layout, loaders: dict[str, Layout]) -> list[object]:
    return [pytest.param(shared, saver, loader, id=f"{name}-{to}") for to, loader in loaders.items()]


def space(ranks: int, arguments: str = "") -> Layout:
    return stock(ranks, f"{DISTRIBUTED} {arguments}")


def gathered(ranks: int, arguments: str = "") -> Layout:
    return stock(ranks, f"{GATHERED} {arguments}")


TO_HYPERFSDP = [
    *pairs(
        "space-dp4",
        "--swiglu",
        space(4),
        {
            "supernodes-of-2": ours(4, 2),
            "supernodes-of-4": ours(4, 4),
            "dp2": ours(2, 1),
            "dp1": ours(1, 1),
            "tp2": ours(4, 2, f"{TP} {NO_RNG}"),
            "pp2": ours(4, 2, f"{PP} {NO_RNG}"),
            "tp2-pp2": ours(4, 1, f"{TP} {PP} {NO_RNG}"),
            "parallel-load": ours(4, 2, "--ckpt-fully-parallel-load"),
        },
    ),
    *pairs(
        "space-tp2-pp2",
        "--swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
        space(4, f"{TP} {PP}"),
        {"same": ours(4, 1, f"{TP} {PP}"), "dp4": ours(4, 2, NO_RNG), "tp2": ours(4, 2, f"{TP} {NO_RNG}")},
    ),
    *pairs("space-pp2", "", space(4, PP), {"supernodes-of-2": ours(4, 2, PP), "dp2": ours(2, 2, NO_RNG)}),
    *pairs("space-uneven", UNEVEN, space(2), {"dp4": ours(4, 4)}),
    *pairs("space-experts", EXPERTS, space(4, EP), {"same": ours(4, 2, EP), "dp1": ours(2, 2, EP), "none": ours(2, 2)}),
    *pairs("space-bf16", "--bf16", space(4), {"supernodes-of-2": ours(4, 2), "dp2": ours(2, 1)}),
    *pairs(
        "gathered-dp4",
        "--swiglu",
        gathered(4, "--overlap-grad-reduce --ddp-bucket-size 20000"),
        {"supernodes-of-2": ours(4, 2), "dp2": ours(2, 1), "dp1": ours(1, 1)},
    ),
    *pairs("gathered-tp2-pp2", "--swiglu", gathered(4, f"{TP} {PP}"), {"same": ours(4, 1, f"{TP} {PP}")}),
    *pairs("gathered-pp2", "", gathered(4, PP), {"supernodes-of-2": ours(4, 2, PP), "dp1": ours(2, 1, PP)}),
    *pairs("gathered-experts", EXPERTS, gathered(4, EP), {"same": ours(4, 2, EP), "dp1": ours(2, 2, EP)}),
    *pairs("gathered-bf16", "--bf16", gathered(2), {"dp4": ours(4, 2)}),
]


@pytest.mark.parametrize(("shared", "saver", "loader"), TO_HYPERFSDP)
def test_a_job_goes_on_from_a_checkpoint_of_the_distributed_optimizer(
    jobs: SavedJobs, shared: str, saver: Layout, loader: Layout
) -> None:
    assert_continues(jobs.saved(shared, saver), jobs.resumed(shared, saver, loader), limits=limits(shared))


def limits(shared: str) -> Limits:
    tolerance = BF16_TOLERANCE if "--bf16" in shared else FP32_TOLERANCE
    return Limits(tolerance, 10 * tolerance, None, None)


OURS = ours(4, 2, DISTRIBUTED)
FROM_HYPERFSDP = [
    *pairs(
        "dp4",
        "--swiglu",
        OURS,
        {
            "stock-dp2": space(2),
            "stock-dp4": space(4),
            "ours": ours(2, 1),
        },
    ),
    *pairs("dp4", WITHOUT_DECAY, OURS, {"stock-tp2-pp2": space(4, f"{TP} {PP} {NO_RNG}")}),
    *pairs("tp2-pp2", WITHOUT_DECAY, ours(4, 1, f"{DISTRIBUTED} {TP} {PP}"), {"stock": space(4, f"{TP} {PP}")}),
    *pairs("experts", EXPERTS, ours(4, 2, f"{DISTRIBUTED} {EP}"), {"stock": space(4, EP), "ours": ours(2, 2, EP)}),
    *pairs("uneven", UNEVEN, ours(4, 4, DISTRIBUTED), {"stock-dp2": space(2)}),
    *pairs("bf16", "--bf16", OURS, {"stock-dp2": space(2), "ours": ours(4, 4, DISTRIBUTED)}),
    *pairs("not-parallel", "", ours(4, 2, GATHERED), {"stock-dp2": space(2)}),
]


@pytest.mark.parametrize(("shared", "saver", "loader"), FROM_HYPERFSDP)
def test_a_job_with_the_flag_saves_what_the_release_reads_with_it(
    jobs: SavedJobs, shared: str, saver: Layout, loader: Layout
) -> None:
    resumed = jobs.resumed(shared, saver, loader)
    assert_continues(jobs.saved(shared, saver), resumed, limits=limits(shared))


@pytest.mark.parametrize(
    ("shared", "loader"),
    [("--swiglu", space(2)), (WITHOUT_DECAY, space(4, f"{TP} {PP} {NO_RNG}"))],
    ids=["dp2", "tp2-pp2"],
)
def test_the_release_resumes_its_own_with_the_help_that_the_tests_give_it(
    jobs: SavedJobs, shared: str, loader: Layout
) -> None:
    assert_continues(jobs.saved(shared, space(4)), jobs.resumed(shared, space(4), loader), limits=limits(WITHOUT_DECAY))
