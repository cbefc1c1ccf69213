"""Faults of Megatron's own sharded data parallelism that its users have reported, each as a test of this adapter.

References are to NVIDIA/Megatron-LM where no other repository is named.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import public_bugs, wrapped
from tests.megatron.checkpoints.jobs import END, EXACT, PP, SavedJobs, assert_continues, assert_same_weights, ours
from tests.megatron.checkpoints.test_experts import EP2, EXPERTS
from tests.support import run_ranks

pytest.importorskip("megatron.core")

PACKAGE = Path(__file__).parents[2] / "hp_plugin" / "megatron"


def run(ranks: int, function: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="megatron", timeout=60.0, **kwargs)


def test_finalization_of_gradients_accepts_the_wrapper() -> None:
    """Issue 4669, PR 4953: with --use-torch-fsdp2 the first step died, since `finish_grad_sync` of that wrapper did not
    take the `force_all_reduce` that `finalize_model_grads` hands it.
    """
    assert run(2, public_bugs.finalized, supernode_size=1) == [0.0, 0.0]


@pytest.mark.parametrize(("ranks", "supernode_size"), [(1, 1), (2, 1)], ids=["dp-1", "shard-groups-of-1"])
def test_many_micro_batches_on_a_group_of_one_rank_are_added_and_not_doubled(ranks: int, supernode_size: int) -> None:
    """Issue 6660: a gradient buffer whose group has one rank was doubled by every micro-batch. (Its other case, experts
    with as many expert-parallel as data-parallel ranks, is among the jobs of `test_equivalence.py`.)
    """
    for found in run(ranks, wrapped.gradients, supernode_size=supernode_size, per_token=False, micro_batches=8):
        assert found and all(difference < 4e-6 for difference in found.values()), found


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_update_is_the_learning_rate_times_the_mean_gradient(micro_batches: int) -> None:
    """Issue 5974, PR 3023: under gradient accumulation a factor of 1 / data-parallel size was applied twice or not at
    all, and updates were 1.3 to 2 times too small; Adam hides such a factor, plain SGD shows it.
    """
    for found in run(2, public_bugs.update_of_plain_sgd, supernode_size=2, micro_batches=micro_batches):
        # Rounding of a weight near 1 is up to 1e-3 of its smallest updates, those of norms.
        assert found and all(difference < 5e-3 for difference in found.values()), found
        assert found["embedding.word_embeddings.weight"] < 1e-6


@pytest.mark.full
def test_layers_keep_their_places_when_the_pipeline_changes(corpus: list[str], tmp_path: Path) -> None:
    """Issue 7452, item 12: a Megatron-FSDP checkpoint named layers by their place in the stage, so that a job with
    another pipeline size loaded the wrong ones.
    """
    jobs, stages, whole = SavedJobs(corpus, tmp_path), ours(2, 1, PP), ours(2, 2)
    for saver, loader in ((stages, whole), (whole, stages)):
        assert_continues(jobs.saved("", saver), jobs.resumed("", saver, loader))
        assert_same_weights(jobs.saved("", saver), jobs.resumed("", saver, loader, step=END))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_expert_parallel_jobs_save_and_resume(corpus: list[str], tmp_path: Path) -> None:
    """Issue 1769: saving a Megatron-FSDP job with expert parallelism failed. (Other expert-parallel sizes, and
    stock as the reader, are in `checkpoints/test_experts.py`.)
    """
    jobs, saver = SavedJobs(corpus, tmp_path), ours(4, 2, EP2)
    assert_continues(jobs.saved(EXPERTS, saver), jobs.resumed(EXPERTS, saver, saver), limits=EXACT)


def test_checkpoints_need_megatron_core_alone() -> None:
    """modelscope/ms-swift PR 10017 (and its issue 9976): helpers for FSDP checkpoints lay in `megatron.training`, which
    an installation of megatron-core from the index does not have.
    """
    # `checkpoints.save` wraps a function of the training loop.
    paths = [path for path in PACKAGE.glob("checkpoints/*.py") if path.name != "save.py"]
    assert len(paths) >= 6
    for path in paths:
        imported = {
            alias.name if isinstance(node, ast.Import) else f"{node.module}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not {name for name in imported if name.startswith("megatron") and not name.startswith("megatron.core")}
