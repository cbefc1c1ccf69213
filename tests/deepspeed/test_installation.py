"""The import is inert until DeepSpeed is there, and refuses a DeepSpeed that it does not know."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_plugin.deepspeed import operations, versions
from hp_plugin.errors import UnsupportedError


def run_program(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_patching_waits_for_deepspeed_and_can_be_undone() -> None:
    program = """
import importlib.util, sys
import hp_plugin.deepspeed
assert "deepspeed" not in sys.modules
assert importlib.util.find_spec("deepspeed") is not None  # as transformers does; must not use the hook up
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
assert "__new__" in vars(DeepSpeedEngine)
from deepspeed.utils import safe_get_full_grad
assert safe_get_full_grad.__wrapped__ is not None
table = hp_plugin.deepspeed.rebinding_table()
assert table and all(entry["state"] == "fits" for entry in table), table
before = deepspeed.zero.GatheredParameters.__init__
hp_plugin.deepspeed.uninstall()
assert deepspeed.zero.GatheredParameters.__init__ is not before
assert not hasattr(deepspeed.utils.safe_get_full_grad, "__wrapped__")
hp_plugin.deepspeed.install()
assert hasattr(deepspeed.utils.safe_get_full_grad, "__wrapped__")

# A changed signature is refused by name.
hp_plugin.deepspeed.uninstall()
DeepSpeedEngine.load_checkpoint = lambda self, directory: None
try:
    hp_plugin.deepspeed.install()
except hp_plugin.deepspeed.installation.targets.UnsupportedError as error:
    print(error)
"""
    told = run_program(program)
    assert "DeepSpeedEngine.load_checkpoint" in told and "does not take load_dir and tag" in told


@pytest.mark.parametrize("version", ["0.16.9", "0.20.0", "1.0"])
def test_a_release_that_is_not_known_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedError, match=f"DeepSpeed {version} is installed.*0.17.x, 0.18.x and 0.19.x"):
        versions.check_deepspeed()


@pytest.mark.parametrize("version", ["0.17.0", "0.18.9", "0.19.8+cpu"])
def test_known_series_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert versions.check_deepspeed() == version


def test_a_stale_build_lock_is_named_and_a_fresh_one_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "py313_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    made = lock.stat().st_mtime
    assert operations.stale_locks(tmp_path, now=made + 60) == []
    (sentence,) = operations.stale_locks(tmp_path, now=made + 3600)
    assert str(lock) in sentence and "fused_adam" in sentence and "remove the file" in sentence


def test_a_build_lock_that_goes_while_locks_are_looked_at_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "lock").symlink_to(tmp_path / "nothing")  # found by name, and not there
    assert operations.stale_locks(tmp_path, now=0.0) == []
