"""Life locks: they tell of every process whether it lives, however it ended."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from hp_plugin.core.kernels import native
from tests.kernels.peers import Segment, line_of, open_segment, result_of


@pytest.fixture
def segment(native_library: native.NativeLibrary) -> Iterator[Segment]:
    with open_segment(native_library) as opened:
        yield opened


HOLD = "say(library.hp_life_begin(file, ctypes.c_int64(%d))); rest()"


def is_held(segment: Segment, offset: int) -> int:
    return int(segment.functions.hp_life_is_held(segment.file, offset))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 30 s"
        time.sleep(0.005)


def test_a_lock_is_held_by_byte_while_the_process_lives(segment: Segment) -> None:
    holder = segment.start(HOLD % 3)
    assert line_of(holder) == ["0"]
    assert [is_held(segment, offset) for offset in range(6)] == [0, 0, 0, 1, 0, 0]
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(timeout=30)
    assert is_held(segment, 3) == 0


def test_a_byte_behind_the_end_of_the_file_serves_as_well(segment: Segment) -> None:
    holder = segment.start(HOLD % (1 << 40))
    assert line_of(holder) == ["0"]
    assert is_held(segment, 1 << 40) == 1


def test_a_killed_process_drops_its_lock_and_a_stopped_one_keeps_it(segment: Segment) -> None:
    holder = segment.start(HOLD % 0)
    assert line_of(holder) == ["0"]
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_held(segment, 0) == 1
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=30)
    assert is_held(segment, 0) == 0


def test_a_process_that_is_dead_but_not_yet_waited_for_holds_nothing(segment: Segment) -> None:
    holder = segment.start(HOLD % 0)
    assert line_of(holder) == ["0"]
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # leaves it a zombie
    assert is_held(segment, 0) == 0


def test_a_forked_child_does_not_inherit_it(segment: Segment) -> None:
    holder = segment.start("""
say(library.hp_life_begin(file, ctypes.c_int64(0)))
child = os.fork()
if child == 0:
    sys.stdout = os.fdopen(os.dup(1), "w")
    time.sleep(60)
    os._exit(0)
say(child)
os.kill(os.getpid(), 9)
""")
    assert line_of(holder) == ["0"]
    child = int(line_of(holder)[0])
    try:
        holder.wait(timeout=30)
        os.kill(child, 0)  # lives, with the descriptor open
        assert os.readlink(f"/proc/{child}/fd/{segment.file}").startswith("/memfd:")
        wait_until(lambda: is_held(segment, 0) == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_of_its_own_lock_a_process_says_0_and_others_1(segment: Segment) -> None:
    assert segment.functions.hp_life_begin(segment.file, 7) == 0
    assert is_held(segment, 7) == 0
    peer = segment.start("say(library.hp_life_is_held(file, ctypes.c_int64(7)))")
    assert result_of(peer) == "1"


def test_closing_another_descriptor_of_the_file_drops_it(segment: Segment) -> None:
    # The rule of POSIX that the header warns of: if it ever changes, the warning may go.
    assert segment.functions.hp_life_begin(segment.file, 7) == 0
    os.close(os.dup(segment.file))
    peer = segment.start("say(library.hp_life_is_held(file, ctypes.c_int64(7)))")
    assert result_of(peer) == "0"


def test_a_lock_that_another_process_holds_is_refused(segment: Segment) -> None:
    holder = segment.start(HOLD % 2)
    assert line_of(holder) == ["0"]
    assert segment.functions.hp_life_begin(segment.file, 2) in (errno.EAGAIN, errno.EACCES)


def test_a_bad_descriptor_is_reported_by_its_errno(segment: Segment) -> None:
    assert segment.functions.hp_life_begin(1 << 20, 0) == errno.EBADF
    assert segment.functions.hp_life_is_held(1 << 20, 0) == -errno.EBADF
