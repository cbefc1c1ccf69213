"""Linux process facts that the test support needs: session marker, death signal, orphans, shared memory.

Standard library only: the reaper starts without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

SHARED_MEMORY = Path("/dev/shm")
# Names given by Python's shared_memory, torch's file_system sharing, POSIX semaphores, and this project.
_SHARED_MEMORY_NAMES = re.compile(r"^(psm_|wnsm_|torch_|sem\.|pym-|hp_)")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when `parent` dies; leave at once if it is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be found and ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Direct children of `pid`, zombies included."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
    return found


def command_line(pid: int) -> str:
    """The command line of `pid`, or an empty string when it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_resource_tracker(pid: int) -> bool:
    """Whether `pid` is what multiprocessing starts beside a process, once, to unlink what that one leaves in memory."""
    return "multiprocessing.resource_tracker" in command_line(pid)


def marked_processes(marker: str) -> list[int]:
    """Living processes that were started with the environment variable `marker`.

    Left out are this process and its resource tracker, if it has one: that ends with it, and not before.
    """
    wanted = f"{marker}=".encode()
    mine = {os.getpid(), *(pid for pid in children_of(os.getpid()) if is_resource_tracker(pid))}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in mine:
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if any(item.startswith(wanted) for item in environment.split(b"\0")):
            found.append(int(entry))
    return found


def kill(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal one process; one that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def end_marked_processes(marker: str, *, deadline_s: float = 10.0) -> list[str]:
    """SIGKILL every marked process until none is left; returns the command lines of what was found.

    Python's resource tracker ends by itself when its users are gone, after unlinking their shared memory. It is
    therefore given half a second before it is killed too.
    """
    started = time.monotonic()
    found: dict[int, str] = {}
    while time.monotonic() - started < deadline_s:
        alive = marked_processes(marker)
        if not alive:
            break
        for pid in alive:
            if is_resource_tracker(pid) and time.monotonic() - started < 0.5:
                continue
            found.setdefault(pid, command_line(pid))
            kill(pid)
        time.sleep(0.02)
    return list(found.values())


def _shared_memory_in_use() -> set[str]:
    """Names under /dev/shm that a living process maps or holds open."""
    used: set[str] = set()
    prefix = f"{SHARED_MEMORY}/"
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/maps") as maps:
                paths = [line.split(maxsplit=5)[5].strip() for line in maps if prefix in line]
            paths += [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]
        except OSError:
            continue
        used.update(path[len(prefix) :] for path in paths if path.startswith(prefix))
    return used


def remove_shared_memory(*, since: float, keep: frozenset[str] = frozenset()) -> list[str]:
    """Unlink shared-memory files that a test session left behind.

    Only files of this user, named as Python, torch or this project name them, created after `since` (seconds since
    the epoch), and neither mapped nor open in any living process, are removed: other users of the machine keep theirs.
    """
    removed = []
    in_use: set[str] | None = None
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        try:
            status = path.lstat()
        except OSError:
            continue
        ours = status.st_uid == os.getuid() and status.st_ctime >= since and path.name not in keep
        if not (ours and _SHARED_MEMORY_NAMES.match(path.name)):
            continue
        in_use = _shared_memory_in_use() if in_use is None else in_use
        if path.name not in in_use:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
