"""HF Trainer trains, evaluates, saves and resumes with our block as with stock ZeRO-3."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.hf import HFRun, train_with_trainer
from tests.support import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")


def run(directory: Path, block: dict[str, Any] | None, *, ranks: int = 2, **options: Any) -> list[HFRun]:
    return run_ranks(
        ranks, train_with_trainer, flavour="deepspeed", timeout=280, directory=str(directory), block=block, **options
    )


def assert_alike(mine: HFRun, theirs: HFRun, *, since: int = 0, tolerance: float = 2e-6) -> None:
    # Trainer rounds what it logs; weights are compared in full.
    for found, expected in [
        (mine.losses, theirs.losses),
        (mine.norms, theirs.norms),
        (mine.evaluated, theirs.evaluated),
    ]:
        assert found[since:] and found[since:] == pytest.approx(expected[since:], rel=1e-4)
    for name, weight in theirs.weights.items():
        assert mine.weights[name].dtype == weight.dtype
        assert float((mine.weights[name] - weight).norm() / weight.norm()) < tolerance, name


@pytest.mark.full
@pytest.mark.timeout(900)
def test_trainer_trains_saves_and_resumes_as_with_zero3(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", None)[0]
    ours = run(tmp_path / "ours", {"supernode_size": 1})[0]
    assert (stock.engine, ours.engine) == ("DeepSpeedEngine", "HyperFSDPEngine")
    assert stock.partitioned and ours.partitioned
    assert_alike(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    assert "global_step4" in ours.files and "latest" in ours.files

    # Interrupted after two steps, and resumed on one supernode.
    shutil.rmtree(tmp_path / "ours" / "checkpoint-4")
    resumed = run(tmp_path / "ours", {"supernode_size": 2}, resume=True)[0]
    assert resumed.steps == 4
    assert_alike(resumed, stock, since=0)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_optimizer_of_the_trainer_works_too(tmp_path: Path) -> None:
    stock = run(tmp_path / "stock", None, optimizer=None, steps=2)[0]
    ours = run(tmp_path / "ours", {"supernode_size": 2}, optimizer=None, steps=2)[0]
    assert_alike(ours, stock)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_hyper_muon_trains_under_the_trainer(tmp_path: Path) -> None:
    two = run(tmp_path / "two", {"supernode_size": 1}, optimizer="HyperMuon", steps=2)[0]
    one = run(tmp_path / "one", {"supernode_size": 2}, optimizer="HyperMuon", steps=2)[0]
    assert two.engine == one.engine == "HyperFSDPEngine"
    assert_alike(two, one, tolerance=1e-3)  # matrices are orthogonalized in bf16
