"""The public names work in a plain script under torchrun, without anything of the test support."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fsdp.runs import single_record
from tests.fsdp.variants import Variant
from tests.support.ranks import REPOSITORY, current_session


def test_script_under_torchrun_equals_one_process(tmp_path: Path) -> None:
    reference = single_record(Variant(backend="single", steps=3)).losses
    current_session()  # its marker lets the reaper end torchrun's ranks, should this test be killed
    output = tmp_path / "losses.json"
    script = REPOSITORY / "tests" / "integration" / "plain_pytorch.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [*torchrun, str(script), str(output)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(output.read_text()) == pytest.approx(reference, rel=2e-6)
