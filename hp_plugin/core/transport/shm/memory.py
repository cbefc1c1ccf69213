"""How much memory a host can still give: what the kernel has left, and what control groups and limits allow."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60


def shortage(nbytes: int) -> str | None:
    """Why `nbytes` of shared memory cannot be had on this host, as half a sentence; None where they can.

    Asked before anything is allocated: a page that does not exist when it is first written kills the process.
    """
    for available, whose in ((_host_bytes(), "this host has"), (_group_bytes(), "the control group of this job has")):
        if nbytes > available:
            return f"{whose} {mebibytes(available)} left"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and nbytes > limit:
        return f"the user limit on file sizes (ulimit -f) is {mebibytes(limit)}; raise it"
    return None


def mebibytes(nbytes: int) -> str:
    """`nbytes` for people."""
    return f"{nbytes / 2**20:.1f} MiB"


def _host_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _UNLIMITED


@dataclass(frozen=True)
class _GroupFiles:
    """Where a version of control groups keeps what it knows about memory."""

    root: str
    limit: str
    used: str
    cached: str


_VERSION_1 = _GroupFiles(
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _GroupFiles("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _group_bytes() -> int:
    """What the control groups of this process, of either version, and those around them leave to it."""
    least = _UNLIMITED
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, inner = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                files = _VERSION_1 if controllers else _VERSION_2
                root = Path(files.root)
                folder = root / inner.lstrip("/")
                # In a container the path may be that outside of it: then only the root is there, and it is the group.
                for each in (folder, *folder.parents):
                    least = min(least, _left_in(each, files))
                    if each == root:
                        break
    return least


def _left_in(folder: Path, files: _GroupFiles) -> int:
    """What one group leaves; pages of files that nobody has used of late count as free."""
    try:
        limit = (folder / files.limit).read_text().strip()
        if limit == "max":
            return _UNLIMITED
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / files.used).read_text()) - int(statistics.get(files.cached, 0))
        return max(0, int(limit) - used)
    except (OSError, ValueError):
        return _UNLIMITED
