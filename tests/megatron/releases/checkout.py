"""A checkout of Megatron-LM that the tests are pointed at, and rank functions that run its own training script."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.megatron import training
from tests.megatron.training import Run

VARIABLE = "MEGATRON_LM_DIR"
"""Environment variable with the folder of the checkout."""

SERIES = re.compile(r"^MAJOR = (\d+)$.*^MINOR = (\d+)$", re.MULTILINE | re.DOTALL)


def reason_to_skip() -> str | None:
    """Why the checkout's jobs cannot run in this environment, or None where they can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} names no checkout of Megatron-LM"
    if not (Path(folder) / "pretrain_gpt.py").is_file():
        return f"{VARIABLE}={folder} holds no pretrain_gpt.py"
    datasets = Path(folder) / "megatron" / "core" / "datasets"
    if not any(datasets.glob(f"helpers_cpp*{sysconfig.get_config_var('EXT_SUFFIX')}")):
        return f"{datasets} holds no helpers_cpp built for this Python; run make there, or copy it from the wheel"
    first = next((place for place in sys.path if (Path(place) / "megatron" / "core").is_dir()), None)
    if first is None or not os.path.samefile(first, folder):
        return f"{folder} is not the first Megatron on the path; set PYTHONPATH={folder} too"
    return None


def folder() -> Path:
    """The checkout."""
    return Path(os.environ[VARIABLE]).resolve()


def series() -> tuple[int, int]:
    """Release series of the checkout."""
    match = SERIES.search((folder() / "megatron" / "core" / "package_info.py").read_text())
    assert match is not None
    return int(match[1]), int(match[2])


def train(*, argv: list[str], keep_weights: bool = True) -> Run:
    """Run the checkout's `pretrain_gpt.py` with `argv` on this rank, as the launcher does."""
    import warnings

    from hp_plugin.megatron import install
    from hp_plugin.megatron.launcher import run_script

    warnings.simplefilter("ignore")
    script = str(folder() / "pretrain_gpt.py")
    sys.argv = [script, *argv]
    install()
    run = Run()
    training._observe(run, keep_weights=keep_weights)
    # A child that Megatron spawns while it saves would import `__main__`, `tests.support.zygote`, again, and look for
    # it in the script's folder first, where 0.16 has a package `tests` of its own.
    forked: Any = sys.modules["__main__"]
    forked.__spec__ = None
    vars(forked).pop("__file__", None)
    module: Any = ModuleType("__main__")
    module.__spec__ = importlib.machinery.ModuleSpec("tests.__main__", None)
    run_script(script, module)
    return run
