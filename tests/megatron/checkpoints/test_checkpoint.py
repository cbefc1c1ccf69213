"""`torch_dist` checkpoints between HyperFSDP and stock Megatron: kinds of models, of optimizers and of saving.

A resumed job must go on as if it had never stopped: same losses, gradient norms and weights as the run that saved.
Layouts and optimizers crosswise are in `test_matrix`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.cases import BF16_TOLERANCE
from tests.megatron.checkpoints.jobs import (
    BF16,
    END,
    HALF,
    INTERLEAVED,
    PP,
    TP,
    Layout,
    SavedJobs,
    assert_continues,
    assert_same_weights,
    ours,
    stock,
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    return SavedJobs(corpus, tmp_path_factory.mktemp("saved"))


def test_a_job_resumes_on_fewer_ranks_and_in_stock_with_tensor_parallelism(jobs: SavedJobs) -> None:
    shared, saver = "--swiglu", ours(4, 2)
    saved = jobs.saved(shared, saver)
    assert_continues(saved, jobs.resumed(shared, saver, ours(2, 2)))
    assert_continues(saved, jobs.resumed(shared, saver, stock(2, TP)))
    assert_same_weights(saved, jobs.resumed(shared, saver, ours(2, 1), step=END))


@pytest.mark.full
def test_a_bf16_job_goes_from_stock_to_hyperfsdp_and_back(jobs: SavedJobs, tmp_path: Path) -> None:
    shared, saver = "--bf16", stock(2)
    saved = jobs.saved(shared, saver)
    assert_same_weights(saved, jobs.resumed(shared, saver, ours(2, 2), step=END))
    moved = jobs.run(shared, ours(4, 2), load=(jobs.place(shared, saver), HALF), save=tmp_path, every=HALF + 2)
    assert_continues(saved, moved, limits=BF16)
    assert_same_weights(moved, jobs.run(shared, ours(2, 2), load=(tmp_path, END)))  # the fp32 masters
    assert_continues(moved, jobs.run(shared, stock(2), load=(tmp_path, HALF + 2)), HALF + 2, BF16)


KINDS = [
    pytest.param(
        "--swiglu --global-batch-size 12 --ffn-hidden-size 172 --untie-embeddings-and-output-weights",
        ours(3, 3),
        [ours(2, 1), stock(2, TP), ours(3, 3, "--ckpt-fully-parallel-load")],
        id="uneven-shards",
    ),
    pytest.param(
        "",
        ours(4, 2, INTERLEAVED),
        [ours(4, 2, PP), ours(4, 2, TP), stock(4, PP), stock(2)],
        id="pipeline-tied-embeddings",
    ),
    pytest.param(
        "--untie-embeddings-and-output-weights",
        ours(4, 2, PP),
        [ours(2, 2), stock(4, INTERLEAVED)],
        id="pipeline-untied",
    ),
    pytest.param(
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2",
        ours(4, 2, f"{TP} --sequence-parallel"),
        [ours(4, 2), stock(2)],
        id="sequence-parallel-gqa-swiglu",
    ),
    pytest.param("--optimizer sgd --sgd-momentum 0.9", ours(4, 2), [ours(2, 2)], id="sgd"),
    pytest.param("", ours(4, 2, "--no-ckpt-fully-parallel-save"), [ours(2, 1), stock(2)], id="plain-save"),
    pytest.param(
        "--position-embedding-type learned_absolute",
        ours(4, 2),
        [ours(2, 2), stock(2, TP)],
        id="learned-positions",
    ),
    pytest.param(
        "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --swiglu",
        ours(4, 2),
        [ours(2, 2), ours(4, 1), stock(2)],
        id="experts",
    ),
    # Without a persistent worker Megatron saves synchronously, with a line that says so.
    pytest.param(
        "",
        ours(4, 2, "--async-save --async-strategy mcore --use-persistent-ckpt-worker"),
        [ours(2, 1), stock(2)],
        id="asynchronous-save",
    ),
    pytest.param(
        "--ckpt-assume-constant-structure", ours(4, 2), [ours(2, 1), stock(2)], id="structure-assumed-constant"
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("shared", "saver", "loaders"), KINDS)
def test_every_kind_of_job_resumes_in_other_layouts(
    shared: str, saver: Layout, loaders: list[Layout], jobs: SavedJobs
) -> None:
    for loader in loaders:
        assert_continues(jobs.saved(shared, saver), jobs.resumed(shared, saver, loader))


@pytest.mark.full
def test_a_vocabulary_with_more_padding_is_filled_up_as_by_stock(jobs: SavedJobs) -> None:
    """256 tokens are padded to 300 rows, and to 400 under tensor parallelism; the new rows change the loss."""
    shared, saver = "--make-vocab-size-divisible-by 100", ours(2, 2)
    reference, found = (jobs.resumed(shared, saver, loader) for loader in (stock(2, TP), ours(4, 2, TP)))
    assert_continues(reference, found)


@pytest.mark.full
def test_a_job_can_start_from_weights_without_optimizer_state(jobs: SavedJobs) -> None:
    shared, saver = "--bf16", stock(2, "--no-save-optim")
    alone = "--finetune --no-load-optim --no-load-rng"
    saved = jobs.saved(shared, saver)
    started, again = (jobs.resumed(shared, saver, loader, step=END) for loader in (ours(2, 2, alone), stock(2, alone)))
    assert started[-1].losses[1] < saved[-1].losses[1] - 0.5, "the weights of the checkpoint were not used"
    assert started[-1].losses[1] == pytest.approx(again[-1].losses[1], rel=BF16_TOLERANCE)
    assert_continues(again, started, 0, BF16)
