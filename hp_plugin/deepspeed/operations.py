"""DeepSpeed's compiled helpers: nothing is compiled behind a job's back, and a stale build lock is named.

On CPU the first initialisation of DeepSpeed compiles `deepspeed_shm_comm` for a minute, which serves its inference
kernels alone and has a fallback. A build that was killed leaves a lock file for which later jobs wait without a word.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUILD_VARIABLE = "HP_DEEPSPEED_BUILD_OPS"
"""Set to 1 to let DeepSpeed compile its helper for inference on CPU when it starts."""

_STALE_S = 600.0


def install() -> Callable[[], None]:
    """Keeps DeepSpeed from compiling its inference helper on CPU, unless asked to; returns what undoes it."""
    communication: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute, that name is torch itself
    accelerators: Any = importlib.import_module("deepspeed.accelerator")
    original = communication.build_shm_op

    def build_shm_op() -> Any:
        if accelerators.get_accelerator().device_name() == "cpu" and not _is_wanted():
            return None
        return original()

    communication.build_shm_op = build_shm_op

    def undo() -> None:
        communication.build_shm_op = original

    return undo


def stale_locks(root: Path | None = None, *, now: float | None = None) -> list[str]:
    """A sentence for every build lock that is too old for a build to be running.

    Args:
        root: Where torch keeps compiled extensions; None asks the environment, as torch does.
        now: Seconds since the epoch; None is the present.
    """
    place = extensions_root() if root is None else root
    moment = time.time() if now is None else now
    sentences = []
    for lock in sorted(place.glob("*/*/lock")) + sorted(place.glob("*/lock")):
        try:
            age = moment - lock.stat().st_mtime
        except FileNotFoundError:  # its build, or the job that only loads what is built, has just let go of it
            continue
        if age > _STALE_S:
            sentences.append(
                f"the build lock {lock} is {age / 60:.0f} minutes old. A build of DeepSpeed's {lock.parent.name} was "
                "killed, and every job that needs it waits for this lock; if no other job is building it, remove the "
                "file."
            )
    return sentences


def extensions_root() -> Path:
    """Where torch keeps the extensions that it has compiled."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def _is_wanted() -> bool:
    return os.environ.get(BUILD_VARIABLE) == "1"
