"""`tools/device_check.py` on CPU: every section runs, and a kernel that is wrong fails the check."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOOLS)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)


def test_a_dry_run_goes_through_every_section(tmp_path: Path) -> None:
    result = run(
        str(TOOLS / "device_check.py"), "--dry-run", "--seconds", "1000", "--json", str(tmp_path / "found.json")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["dry_run"] is True and found["failures"] == [] and found["left_out"] == []
    assert {row["section"] for row in found["rows"]} == {"peak", "correct", "Newton-Schulz", "FSDP"}
    whats = {row["what"] for row in found["rows"]}
    assert {"torch.optim.Muon", "fp16 Gram, Triton", "hp_plugin: host time of a step", "decay and update"} <= whats
    assert "times mean nothing" in result.stdout and "not judged on CPU" in result.stdout


WRONG = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import device_check
from hp_plugin.core.kernels.triton_kernels import launch
right = launch.decay_update_
launch.decay_update_ = lambda target, values, decay, step: right(target, values, decay, 1.01 * step)
for section in ("matrix_peak", "orthogonalization", "sharding"):
    def nothing(setting, results): pass
    nothing.__name__ = section
    setattr(device_check, section, nothing)
sys.argv = ["device_check", "--dry-run"]
device_check.main()
"""


def test_a_wrong_kernel_fails_the_check() -> None:
    result = run("-c", WRONG)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: decay and update: error" in result.stdout
    assert "1 failed" in result.stdout


def test_without_a_device_it_says_what_to_do() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = run(str(TOOLS / "device_check.py"))
    assert result.returncode == 1
    assert "--dry-run runs the script's logic on CPU" in result.stderr


def test_sections_that_would_begin_too_late_are_left_out() -> None:
    result = run(str(TOOLS / "device_check.py"), "--dry-run", "--seconds", "-1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("left out for want of time") == 4
