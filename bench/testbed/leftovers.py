"""Removal of namespaces with everything in them: at the end of a testbed, and after a tool that was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from bench.testbed.commands import CommandError, ip, require_programs, require_root
from bench.testbed.names import is_ownerless, namespaces

_DEATH_LIMIT_S = 10.0


def remove_leftovers() -> list[str]:
    """Remove the testbeds whose process is dead. Returns the names of the namespaces that were removed."""
    require_root()
    require_programs()
    for entry in Path(tempfile.gettempdir()).iterdir():
        if is_ownerless(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    return remove_namespaces([name for name in namespaces() if is_ownerless(name)])


def remove_namespaces(names: list[str]) -> list[str]:
    """End all processes in the namespaces, then remove these; their devices and links vanish with them.

    A namespace that another process removes at the same time is no error. Returns the names that this call removed.
    """
    removed = []
    for name in names:
        try:
            _end_processes(name)
            ip("netns", "delete", name)
        except CommandError:
            if name in namespaces():
                raise
        else:
            removed.append(name)
    return removed


def _end_processes(name: str) -> None:
    limit = time.monotonic() + _DEATH_LIMIT_S
    while pids := [int(word) for word in ip("netns", "pids", name).split()]:
        if time.monotonic() > limit:
            raise CommandError(f"the processes {pids} in the namespace {name} survive SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
