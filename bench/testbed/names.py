"""Names that say which living process a namespace or a directory belongs to.

`hptb-PID-STARTTIME-N-...`: the start time (in clock ticks since boot, from /proc) tells a process from a later one with
the same pid, so what a killed tool left behind is known for certain.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"^hptb-(\d+)-(\d+)-\d+(-|$)")
_counter = itertools.count()


def new_prefix() -> str:
    """A prefix for the names of one testbed of this process, unused so far."""
    return f"hptb-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"


def is_ownerless(name: str) -> bool:
    """Whether `name` is one of ours and its process is dead. False for names that are not ours."""
    found = _NAME.match(name)
    return found is not None and _start_time(int(found.group(1))) != int(found.group(2))


def namespaces() -> list[str]:
    """Names of all named network namespaces of this machine."""
    try:
        return sorted(entry.name for entry in NAMESPACES.iterdir())
    except FileNotFoundError:
        return []


def _start_time(pid: int) -> int | None:
    """Start time of a living process; None for one that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
