"""A process that imports the heavy modules once and then forks the ranks of every case.

Runs as `python -m tests.support.zygote DESCRIPTOR FLAVOUR`, started by `tests.support.ranks`. It stays single-threaded,
since only the calling thread survives a fork, and adopts the orphans of its ranks, so that whatever a rank leaves
behind is found and ended after the case.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from tests.support import rank as rank_process
from tests.support.flavours import FLAVOURS
from tests.support.processes import adopt_orphans, children_of, command_line, die_with_parent, kill
from tests.support.protocol import Case, Outcome, RankEnd, receive, send

PEER_GRACE_S = 0.4  # after the first failure: time for peers to report their own
TRACE_GRACE_S = 0.2  # after asking a hanging rank for its stacks
LEAVE_GRACE_S = 15.0  # after the last result: time for orderly exits
ORPHAN_GRACE_S = 2.0  # after the last exit: time for helpers of multiprocessing to notice


@dataclass
class _Rank:
    pid: int
    status: int
    word: str = ""
    exit_code: int | None = None
    stopped: bool = False

    @property
    def gone(self) -> bool:
        return self.exit_code is not None

    def poll(self) -> None:
        """Take up the status byte and the exit of the process, without waiting."""
        if not self.word and select.select([self.status], [], [], 0)[0]:
            self.word = os.read(self.status, 1).decode()
        if not self.gone:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def end(self) -> RankEnd:
        """How this rank ended."""
        state = "failed" if self.word == "-" else "stopped" if self.stopped else "died"
        return RankEnd("returned" if self.word == "+" and self.exit_code == 0 else state, self.exit_code)


class _AbandonedError(Exception):
    """pytest closed the channel while a case was running."""


class Job:
    """The ranks of one case, from fork to the last trace of them."""

    def __init__(self, case: Case, control: socket.socket) -> None:
        self.case = case
        self.control = control
        self.deadline = time.monotonic() + case.timeout_s
        self.timed_out = False
        self.ranks: list[_Rank] = []
        release_read, self.release = os.pipe()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(case.nprocs):
                self._fork(rank, listener, release_read)
        os.close(release_read)

    def _fork(self, rank: int, listener: socket.socket, release_read: int) -> None:
        parent = os.getpid()
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            close = [self.control.fileno(), self.release, status_read, *(peer.status for peer in self.ranks)]
            rank_process.run(
                self.case,
                rank,
                parent=parent,
                status=status_write,
                release=release_read,
                listener=listener,
                close=close,
            )
        os.close(status_write)
        self.ranks.append(_Rank(pid, status_read))

    def run(self) -> Outcome:
        """Wait for the ranks, end what must be ended, and say how each of them ended."""
        try:
            orderly = self._wait_for_results()
            if orderly:
                self._release()
            else:
                self._stop(grace_s=0.0 if self.timed_out else PEER_GRACE_S)
            left_behind = self._end_orphans(orderly=orderly)
            return Outcome([rank.end() for rank in self.ranks], self.timed_out, left_behind)
        finally:
            self._close()

    def _poll(self, wait_s: float = 0.01) -> None:
        readable, _, _ = select.select([self.control], [], [], wait_s)
        if readable:
            raise _AbandonedError
        for rank in self.ranks:
            rank.poll()

    def _wait_for_results(self) -> bool:
        """True when every rank has a result; False at the first failure or when the time is up."""
        while True:
            self._poll()
            if all(rank.word == "+" for rank in self.ranks):
                return True
            if any(rank.word == "-" or rank.gone for rank in self.ranks):
                return False
            if time.monotonic() > self.deadline:
                self.timed_out = True
                return False

    def _release(self) -> None:
        """Let the finished ranks leave; kill those that do not manage to."""
        os.close(self.release)
        self.release = -1
        if not self._poll_until(lambda: all(rank.gone for rank in self.ranks), LEAVE_GRACE_S):
            self.timed_out = True
            self._kill(self.ranks)

    def _stop(self, *, grace_s: float) -> None:
        """Give unfinished ranks `grace_s` to fail on their own, have them print their stacks, and end all ranks."""
        self._poll_until(lambda: all(rank.word or rank.gone for rank in self.ranks), grace_s)
        unfinished = [rank for rank in self.ranks if not rank.gone and not rank.word]
        for rank in unfinished:
            kill(rank.pid, signal.SIGUSR1)
        self._poll_until(lambda: all(rank.gone for rank in unfinished), TRACE_GRACE_S)
        self._kill(unfinished)
        self._release()

    def _kill(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            if not rank.gone:
                rank.stopped = True
                kill(rank.pid)
        self._poll_until(lambda: all(rank.gone for rank in ranks), 10.0)

    def _poll_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        limit = time.monotonic() + limit_s
        while not (reached := done()) and time.monotonic() < limit:
            self._poll()
        return reached

    def _end_orphans(self, *, orderly: bool) -> list[str]:
        """End descendants that outlived their rank; returns what outlived an orderly end for too long.

        Python's resource tracker is left to end by itself: it unlinks shared memory on its way out.
        """
        found: dict[int, str] = {}
        started = time.monotonic()
        while orphans := set(children_of(os.getpid())) - {rank.pid for rank in self.ranks if not rank.gone}:
            late = time.monotonic() - started > ORPHAN_GRACE_S
            for pid in orphans:
                words = command_line(pid)
                if late or not (orderly or "resource_tracker" in words):
                    if orderly and words:
                        found.setdefault(pid, words)
                    kill(pid)
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)
        return list(found.values())

    def _close(self) -> None:
        for rank in self.ranks:
            if not rank.gone:
                kill(rank.pid)
                os.waitpid(rank.pid, 0)
            os.close(rank.status)
        if self.release >= 0:
            os.close(self.release)


def serve(control: socket.socket, flavour: str) -> None:
    """Preload, say "ready", then run one case after another until pytest closes the channel."""
    try:
        FLAVOURS[flavour].preload()
        threads = os.listdir("/proc/self/task")
        if len(threads) != 1:
            raise RuntimeError(
                f"The {flavour} zygote has {len(threads)} threads after its imports, but forking needs exactly one: "
                f"find which module starts a thread when imported and import it in the ranks instead."
            )
    except BaseException:
        send(control, traceback.format_exc())
        return
    send(control, "ready")
    while True:
        try:
            case = receive(control)
            send(control, Job(case, control).run())
        except (EOFError, _AbandonedError, BrokenPipeError):
            return


def main(descriptor: int, flavour: str) -> None:
    """Entry point; `descriptor` is this side of the channel to pytest."""
    die_with_parent(int(os.environ["HP_TEST_PYTEST_PID"]))
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest decides what an interrupt means
    serve(socket.socket(fileno=descriptor), flavour)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
