"""The commands of docs/migrating-deepspeed.md, as they stand there: from ZeRO-3 to HyperFSDP and Muon, and back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating-deepspeed.md"
TIME_LIMIT_S = 300
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
PRINTED = 5e-6
"""Relative: the script prints seven decimals."""


def blocks() -> list[str]:
    """The shell commands of the page, in order."""
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(commands: str, directory: Path) -> str:
    # As a shell in which the package is installed would find them.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=directory, env=environment, timeout=TIME_LIMIT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


def assert_goes_on(reference: dict[int, float], resumed: dict[int, float], first: int, last: int) -> None:
    assert sorted(resumed) == list(range(first, last + 1))
    for step, loss in resumed.items():
        assert loss == pytest.approx(reference[step], rel=PRINTED)


def test_the_page_has_commands_for_every_step() -> None:
    text = "\n".join(blocks())
    for words in (
        "hp-plugin check ds_config.json --fix",
        "--to hyperfsdp --verify",
        "--to universal --verify",
        "--to safetensors",
        "HyperMuon",
        "load_universal",
    ):
        assert words in text


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_job_moves_over_and_back_with_the_commands_of_the_page(tmp_path: Path) -> None:
    setup, first, checked, supernode, resumed, converted, muon, back, weights = blocks()
    environment = setup.splitlines()[0] + "\n"
    run(setup, tmp_path)
    started = losses(run(environment + first, tmp_path))
    # What the page does not need: the job without an interruption.
    reference = losses(run(environment + first.replace("--until 4 --save ckpt", "--until 12"), tmp_path))
    assert started == {step: reference[step] for step in range(4)}
    assert "a job with this configuration starts" in run(checked, tmp_path)
    run(supernode, tmp_path)
    moved = run(environment + resumed, tmp_path)
    assert "is a checkpoint of ZeRO-3 of 2 ranks" in moved and "HyperFSDP: " in moved
    assert_goes_on(reference, losses(moved), 4, 7)
    assert "verified" in run(converted, tmp_path)
    with_muon = run(environment + muon, tmp_path)
    assert "parameters: muon from exp_avg" in with_muon
    assert losses(with_muon)[8] == pytest.approx(reference[8], rel=PRINTED), "the weights before Muon's first step"
    assert losses(with_muon)[11] != pytest.approx(reference[11], rel=1e-4)
    assert_goes_on(reference, losses(run(environment + back, tmp_path)), 8, 11)
    assert "verified" in run(weights, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()
