"""Nothing is left behind when pytest itself is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.ranks import REPOSITORY

INNER_TEST = """
from tests.support import cases, run_ranks

def test_hangs():
    run_ranks(2, cases.start_manager, pid_file={pid_file!r}, then="hang", timeout=300.0)
"""


def wait_until(condition: object, limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sig: sig.name)
def test_killed_pytest_leaves_nothing_behind(sig: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    test_file = tmp_path / "test_inner.py"
    test_file.write_text(INNER_TEST.format(pid_file=str(pid_file)))
    temporary = Path(tempfile.mkdtemp(prefix="hp_"))  # short: a Manager's socket lies below, and has 108 characters
    inner = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(test_file)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A shell that starts jobs in the background has them ignore SIGINT, and so would Python.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        files = [Path(f"{pid_file}.{rank}") for rank in range(2)]

        def ready() -> bool:
            return all(file.exists() and file.read_text().endswith("\n") for file in files)

        wait_until(lambda: ready() or inner.poll() is not None, 120.0)
        if not ready():
            inner.kill()
            pytest.fail(f"the inner session did not start its case:\n{inner.communicate()[0].decode()}")
        lines = [file.read_text().split() for file in files]
        pids = [int(word) for line in lines for word in line[:2]]
        blocks = [Path("/dev/shm", line[2]) for line in lines]
        assert all(map(is_alive, pids))
        assert all(block.exists() for block in blocks)
        marked = pids + inner_processes(inner.pid)

        inner.send_signal(sig)
        inner.wait(timeout=30.0)

        assert wait_until(lambda: not any(map(is_alive, marked)), 10.0), [p for p in marked if is_alive(p)]
        assert wait_until(lambda: not any(block.exists() for block in blocks), 10.0), blocks
        assert wait_until(lambda: not list(temporary.iterdir()), 10.0), list(temporary.iterdir())
    finally:
        inner.kill()
        inner.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def inner_processes(pid: int) -> list[int]:
    """All living descendants of `pid`: reaper, zygote, ranks, managers, resource trackers."""
    from tests.support.processes import children_of

    found = []
    for child in children_of(pid):
        found += [child, *inner_processes(child)]
    return found


SESSION_WITH_TRACKER = """
import subprocess
from multiprocessing import shared_memory
from tests.support.ranks import close_session, current_session

current_session()
block = shared_memory.SharedMemory(create=True, size=64)  # multiprocessing starts its tracker for this process
block.close()
block.unlink()
left = subprocess.Popen(["sleep", "60"]) if {leave} else None
print(close_session())
"""


@pytest.mark.parametrize(("leave", "expected"), [(False, "[]"), (True, "['sleep 60']")])
def test_resource_tracker_of_pytest_itself_is_not_left_behind(leave: bool, expected: str) -> None:
    code = SESSION_WITH_TRACKER.format(leave=leave)
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (ended.stdout.strip(), ended.stderr) == (expected, "")
