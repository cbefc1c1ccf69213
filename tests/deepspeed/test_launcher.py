"""`python -m hp_plugin.deepspeed SCRIPT` runs the script as it is, and says a refusal as one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hp_plugin.deepspeed", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_a_script_runs_as_main_with_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "neighbour.py").write_text("value = 3\n")
    script.write_text(
        "import sys, neighbour, hp_plugin.deepspeed\n"
        "installed = hp_plugin.deepspeed.installation._installed is not None\n"
        "print(__name__, sys.argv[1:], neighbour.value, installed)\n"
        "from hp_plugin.errors import UnsupportedError\n"
        "raise UnsupportedError('this is refused; use that.')\n"
    )
    result = launch(str(script), "--deepspeed_config", "c.json")
    assert result.stdout == "__main__ ['--deepspeed_config', 'c.json'] 3 True\n"
    assert result.returncode == 1
    assert result.stderr.strip() == "hp_plugin: error: this is refused; use that."


def test_a_script_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = launch(str(tmp_path / "missing.py"))
    assert result.returncode == 2 and "missing.py does not exist" in result.stderr
