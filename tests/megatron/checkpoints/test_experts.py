"""Checkpoints of expert-parallel jobs: between HyperFSDP and stock, and between numbers of expert-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.checkpoints import expert_jobs as expert_checkpoints
from tests.megatron.checkpoints.jobs import BF16, EXACT, PP, TP, Layout, SavedJobs, assert_continues, ours, stock
from tests.support import run_ranks

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --swiglu"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"

PAIRS = {
    "ours-to-stock": (ours(4, 2, EP2), stock(4, EP2)),
    "stock-to-ours": (stock(4, EP2), ours(4, 4, EP2)),
    "shards-to-replicas": (ours(4, 4, EP2), ours(4, 2, EP2)),
    "fewer-ranks": (ours(4, 4, EP2), ours(2, 2, EP2)),
    "2-to-4": (ours(4, 4, EP2), ours(4, 2, EP4)),
    "4-to-2": (ours(4, 2, EP4), ours(4, 4, EP2)),
    "stock-2-to-ours-4": (stock(4, EP2), ours(4, 4, EP4)),
    "ours-4-to-stock-2": (ours(4, 2, EP4), stock(4, EP2)),
    "2-to-none": (ours(4, 4, EP2), ours(2, 2)),
    "none-to-2": (ours(2, 2), ours(4, 4, EP2)),
    "stock-2-to-ours-without": (stock(4, EP2), ours(2, 1)),
    "pipelined": (ours(4, 2, f"{EP2} {PP}"), ours(4, 4, EP2)),
    "to-a-pipeline": (ours(4, 4, EP2), stock(4, f"{EP2} {PP}")),
    "tensor-parallel": (ours(4, 2, f"{EP2} {TP} --sequence-parallel"), ours(4, 4, EP2)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("saver", "loaders"),
    [
        pytest.param(("ours", 2), [("ours", 2), ("stock", 2), ("ours", 1)], id="ours"),
        pytest.param(("stock", 2), [("ours", 2), ("ours", 1)], id="stock"),
        pytest.param(("ours", 1), [("ours", 2), ("stock", 1)], id="ours-without"),
    ],
)
def test_experts_and_their_optimizer_are_read_for_other_numbers_of_ranks(
    saver: tuple[str, int], loaders: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Two steps from what was read equal two steps from what was saved: weights and both moments are right."""
    for found in run_ranks(
        2,
        expert_checkpoints.round_trip,
        flavour="megatron",
        timeout=90.0,
        directory=str(tmp_path / "saved"),
        saver=saver,
        loaders=loaders,
        supernode_size=2,
    ):
        print(found)
        for norms in found.values():
            assert norms == pytest.approx(found["saved"], rel=2e-6)


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    directory: Path = tmp_path_factory.mktemp("experts")
    return SavedJobs(corpus, directory)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pair", PAIRS)
def test_an_expert_parallel_job_resumes_in_another_layout(pair: str, jobs: SavedJobs) -> None:
    saver, loader = PAIRS[pair]
    assert_continues(jobs.saved(EXPERTS, saver), jobs.resumed(EXPERTS, saver, loader))


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("loader", [ours(2, 2, EP2), ours(2, 2), stock(2, EP2)], ids=str)
def test_fp32_weights_of_bf16_experts_are_part_of_the_checkpoint(loader: Layout, jobs: SavedJobs) -> None:
    shared, saver = f"{EXPERTS} --bf16", ours(2, 2, EP2)
    reference, resumed = jobs.saved(shared, saver), jobs.resumed(shared, saver, loader)
    assert_continues(reference, resumed, limits=EXACT if loader == saver else BF16)
