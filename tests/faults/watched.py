"""A part of a rank's work in a process of its own, whose end the rank sees: a rank that is killed reports nothing.

Everything here runs in a rank of `run_ranks`. The store of the case is served by rank 0 itself, so it outlives what is
done to the children.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import die_with_parent, marked_processes

STEP_S = 0.02


@dataclass
class End:
    """How a child ended.

    Attributes:
        how: "returned", "raised", "killed" (by itself) or "stopped" (and killed when all others had ended).
        at: When, as seen by its parent. The clock is that of all processes of the host.
        error: Type and message of what it raised.
        value: What it returned.
        trace: Traceback of what it raised.
    """

    how: str
    at: float
    error: str = ""
    value: Any = None
    trace: str = ""


def watch(work: Callable[[], Any], *, directory: str, ranks: int) -> End:
    """Runs `work` in a child of this rank.

    Args:
        work: What is done. It may kill or stop its process.
        directory: Where ranks tell one another that their children have ended.
        ranks: How many ranks watch a child. A stopped child is killed when all others have ended.
    """
    read, write = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the thread that serves the store
        pid = os.fork()
    if pid == 0:
        _be_child(work, parent, write)
    os.close(write)
    end = _wait_for(pid, read, lambda: len(list(Path(directory).glob("ended.*"))) >= ranks - 1)
    Path(directory, f"ended.{os.environ['RANK']}").touch()
    os.close(read)
    return end


def _be_child(work: Callable[[], Any], parent: int, write: int) -> None:
    try:
        die_with_parent(parent)
        try:
            told = ("returned", "", work(), "")
        except BaseException as error:
            told = ("raised", f"{type(error).__name__}: {error}", None, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(told))
        atexit._run_exitfuncs()  # as at the end of a program
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _wait_for(pid: int, read: int, others_have_ended: Callable[[], bool]) -> End:
    told, is_stopped = b"", False
    while True:
        if select.select([read], [], [], STEP_S)[0]:
            told += os.read(read, 1 << 20)
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            is_stopped = True
        elif found:
            break
        if is_stopped and others_have_ended():
            os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    while more := os.read(read, 1 << 20):
        told += more
    if not told:
        return End("stopped" if is_stopped else "killed", at)
    how, error, value, trace = pickle.loads(told)
    return End(how, at, error, value, trace)


def end_process(how: str) -> None:
    """Ends or stops the calling process, or raises."""
    if how == "raise":
        raise ArithmeticError("injected")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    time.sleep(600)


@contextmanager
def nothing_is_left(marker: str) -> Iterator[None]:
    """Fails where what is done inside leaves a process, shared memory or a socket of this test session behind."""
    before = set(marked_processes(marker))
    files = set(os.listdir("/dev/shm"))
    yield
    limit = time.monotonic() + 5.0
    while (left := _traces(marker, before)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, left
    names = {name for name in set(os.listdir("/dev/shm")) - files if "hyperfsdp" in name or name.startswith("hp_")}
    assert not names, names


def _traces(marker: str, before: set[int]) -> list[str]:
    found = []
    for pid in marked_processes(marker):
        if pid not in before and "tests.support.zygote" not in Path(f"/proc/{pid}/cmdline").read_text():
            found.append(f"process {pid}")
        found += [f"{where} of process {pid}" for where in segments_of(pid)]
    return found


def segments_of(pid: int) -> list[str]:
    """What of shared memory a process maps or holds open, by the numbers of the files: memory, and named sockets."""
    found = []
    lines = Path("/proc/net/unix").read_text().splitlines()
    sockets = {line.split()[6] for line in lines if "@hyperfsdp" in line}
    try:
        with open(f"/proc/{pid}/maps") as maps:
            found += [f"memory file {line.split()[4]}" for line in maps if "memfd:hyperfsdp" in line]
        for each in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{each}"
            target, number = os.readlink(path), str(os.stat(path).st_ino)
            if "memfd:hyperfsdp" in target:
                found.append(f"memory file {number}")
            if target.startswith("socket:") and number in sockets:
                found.append(f"socket {number}")
    except OSError:
        pass  # it has just ended
    return found
