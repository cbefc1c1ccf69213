"""A checkpoint continues a job on any number of ranks and supernodes as if it had not stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.deepspeed import convert_jobs, helpers
from tests.deepspeed.training import Run
from tests.support import run_ranks

STEPS, MORE = 3, 3


def assert_equal(found: Run, expected: Run) -> None:
    for a, b in [(found.losses, expected.losses), (found.norms, expected.norms)]:
        assert max(abs(x - y) / abs(y) for x, y in zip(a, b)) < 2e-6
    assert found.rates == expected.rates
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).norm() / weight.norm()) < 2e-6, name


@pytest.mark.full
@pytest.mark.timeout(900)
def test_training_continues_on_other_meshes_as_if_uninterrupted(tmp_path: Path) -> None:
    directory = str(tmp_path)
    saved = run_ranks(
        2,
        helpers.train_and_save,
        flavour="deepspeed",
        timeout=200,
        directory=directory,
        steps=STEPS,
        more=MORE,
        supernode_size=1,
        clients_differ=True,
    )
    assert (tmp_path / "latest").read_text() == f"global_step{STEPS}"
    for ranks, supernode_size in [(2, 1), (2, 2), (3, 3), (4, 2)]:
        loaded = run_ranks(
            ranks,
            helpers.load_and_train,
            flavour="deepspeed",
            timeout=200,
            directory=directory,
            steps=STEPS,
            more=MORE,
            supernode_size=supernode_size,
        )
        for rank, (run, client) in enumerate(loaded):
            assert_equal(run, saved[0])
            assert client["epoch"] == 7 and torch.equal(client["seen"], torch.tensor([STEPS]))
            assert client["rank"] == (rank if rank < 2 else 0)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_parts_of_a_checkpoint_and_what_is_none(tmp_path: Path) -> None:
    directory = str(tmp_path)
    run_ranks(
        2,
        helpers.train_and_save,
        flavour="deepspeed",
        timeout=200,
        directory=directory,
        steps=STEPS,
        more=0,
        supernode_size=2,
    )
    facts = run_ranks(2, helpers.load_in_part, flavour="deepspeed", timeout=200, directory=directory)[0]
    assert facts["nothing"] == (None, None)
    assert "ConfigurationError" in facts["unknown"] and "global_step99" in facts["unknown"]
    assert "ConfigurationError" in facts["zero"] and "cannot be read" in facts["zero"]
    assert "custom_load_fn" in facts["function"]
    steps, states, rate = facts["weights only"]
    assert (steps, states) == (0, 0)
    assert facts["no optimizer"] == (STEPS, 0, rate)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(2, helpers.save_without_frozen, flavour="deepspeed", timeout=200, directory=str(tmp_path))


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.timeout(400)
def test_zero_to_fp32_reads_our_checkpoints(bf16: bool, tmp_path: Path) -> None:
    run_ranks(
        2, convert_jobs.read_with_zero_to_fp32, flavour="deepspeed", timeout=200, directory=str(tmp_path), bf16=bf16
    )
