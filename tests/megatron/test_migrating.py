"""The commands of docs/migrating-megatron.md, as they stand there: from stock to HyperFSDP and Muon, and back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating-megatron.md"
TIME_LIMIT_S = 300
LOSS = re.compile(r"iteration\s+(\d+)/.*lm loss: (\S+) ")
PRINTED = 5e-6
"""Relative: the log has seven digits."""


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
    return {int(iteration): float(loss) for iteration, loss in LOSS.findall(output)}


def assert_goes_on(reference: dict[int, float], resumed: dict[int, float], first: int, last: int) -> None:
    assert sorted(resumed) == list(range(first, last + 1))
    # The second line that Megatron prints after a start has the mean of two iterations.
    for iteration in set(resumed) - {first + 1}:
        assert resumed[iteration] == pytest.approx(reference[iteration], rel=PRINTED)


def test_the_page_has_commands_for_every_step() -> None:
    text = "\n".join(blocks())
    for words in (
        "hp-plugin check",
        "--hyperfsdp-migrate observe",
        "--use-hyperfsdp",
        "--use-hypermuon",
        "--load ckpt",
    ):
        assert words in text


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_job_moves_over_and_back_with_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    setup, first, checked, observed, alone, muon, back = blocks()
    environment = setup.splitlines()[0] + "\n"
    run(setup, tmp_path)
    started = losses(run(environment + first, tmp_path))
    # What the page does not need: the job without an interruption.
    reference = losses(run(environment + first.replace("--exit-interval 6 --save ckpt", ""), tmp_path))
    assert started == {iteration: reference[iteration] for iteration in range(1, 7)}
    assert "a job with these arguments starts" in run(environment + checked, tmp_path)
    watched = run(environment + observed, tmp_path)
    assert_goes_on(reference, losses(watched), 7, 12)
    assert watched.count("hp_plugin: observe: ") == 7
    assert_goes_on(reference, losses(run(environment + alone, tmp_path)), 7, 12)
    with_muon = losses(run(environment + muon, tmp_path))
    assert sorted(with_muon) == list(range(13, 19))
    assert with_muon[13] == pytest.approx(reference[13], rel=PRINTED), "the weights before Muon's first step"
    assert with_muon[18] != pytest.approx(reference[18], rel=1e-4)
    assert_goes_on(reference, losses(run(environment + back, tmp_path)), 13, 18)
