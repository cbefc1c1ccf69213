"""`run_ranks`: run a function on N freshly forked ranks and get their results, or every rank's failure.

[Note: who ends whom]
pytest starts one *zygote* per flavour (an interpreter with the heavy modules imported) and one *reaper*. The zygote
forks the ranks of a case. A rank dies with its zygote, and a zygote with pytest, by the kernel's parent-death signal.
What a rank started (a spawn Manager, say) is adopted by the zygote and ended after the case. Should pytest and the
zygote be killed, such processes become orphans of init; they still carry the session's marker in their environment, by
which the reaper, who notices the end of pytest from a closed pipe, finds and ends them.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.flavours import FLAVOURS
from tests.support.processes import end_marked_processes, marked_processes
from tests.support.protocol import Case, Outcome, receive, send

REPOSITORY = Path(__file__).resolve().parents[2]
PRELOAD_LIMIT_S = 240.0
OUTPUT_TAIL = 6000  # characters of a rank's output shown in a failure


@dataclass(frozen=True)
class RankReport:
    """How one rank of a failed case ended; see `RankEnd` for `state` and `exit_code`."""

    rank: int
    state: str
    exit_code: int | None
    error: str
    output: str

    def __str__(self) -> str:
        text = f"--- rank {self.rank}: {self.state}, exit code {self.exit_code}\n{self.error}"
        return text + (f"--- rank {self.rank}: its output\n{self.output[-OUTPUT_TAIL:]}" if self.output else "")


class RanksFailedError(RuntimeError):
    """At least one rank did not return, or a process outlived the case.

    Attributes:
        reports: one report per rank, in rank order.
        timed_out: whether the time limit ended the case.
        left_behind: command lines of processes that outlived an orderly end.
    """

    def __init__(self, case: Case, outcome: Outcome, reports: list[RankReport]) -> None:
        self.reports = reports
        self.timed_out = outcome.timed_out
        self.left_behind = outcome.left_behind
        if outcome.timed_out:
            reason = f"did not finish within {case.timeout_s:g} s"
        elif outcome.left_behind:
            reason = f"left processes behind: {outcome.left_behind}"
        else:
            bad = [report.rank for report in reports if report.state in ("failed", "died")]
            reason = f"failed on ranks {bad}"
        super().__init__("\n".join([f"{case.target} on {case.nprocs} ranks {reason}", *map(str, reports)]))


class _Zygote:
    """pytest's side of one zygote process."""

    def __init__(self, flavour: str, environment: dict[str, str], log: Path) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno()), flavour],
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._control.settimeout(PRELOAD_LIMIT_S)
        try:
            answer = receive(self._control)
        except (EOFError, TimeoutError) as error:
            answer = f"no answer within {PRELOAD_LIMIT_S:g} s, or early exit: {error!r}"
        if answer != "ready":
            self.close()
            raise RuntimeError(f"The {flavour!r} zygote could not start: {answer}\n{log.read_text(errors='replace')}")

    def run(self, case: Case) -> Outcome:
        """Run one case; the zygote keeps the time limit, so the wait here only guards against a lost zygote."""
        self._control.settimeout(case.timeout_s + 60.0)
        send(self._control, case)
        outcome = receive(self._control)
        assert isinstance(outcome, Outcome)
        return outcome

    def close(self) -> None:
        """End the zygote and, with it, ranks that are still running."""
        self._control.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Session:
    """Everything that the multi-process tests of one pytest run own: marker, reaper, zygotes, temporary directory."""

    def __init__(self) -> None:
        self.marker = f"HP_TEST_SESSION_{uuid.uuid4().hex}"
        self.directory = tempfile.mkdtemp(prefix="hp_test_")
        self._zygotes: dict[str, _Zygote] = {}
        self._numbers = itertools.count()
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.support.reaper", self.marker, repr(time.time()), self.directory],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # Set after the reaper started: it must not find itself. Everything started later inherits the marker.
        os.environ[self.marker] = "1"

    def run(self, case: Case, flavour: str) -> Outcome:
        """Run `case` in the zygote of `flavour`, which is started when it is first needed."""
        if flavour not in self._zygotes:
            log = Path(self.directory, f"{flavour}.log")
            self._zygotes[flavour] = _Zygote(flavour, self._environment(flavour), log)
        try:
            return self._zygotes[flavour].run(case)
        except BaseException:
            # An interrupt or a lost zygote: what runs must end, and the next case gets a new zygote.
            self._zygotes.pop(flavour).close()
            raise

    def new_directory(self) -> str:
        """A fresh directory that lives as long as the case."""
        path = os.path.join(self.directory, f"case{next(self._numbers)}")
        os.mkdir(path)
        return path

    def _environment(self, flavour: str) -> dict[str, str]:
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "HP_TEST_PYTEST_PID": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": self.directory,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **FLAVOURS[flavour].environment,
        }

    def close(self) -> list[str]:
        """End the session; returns the command lines of processes that had outlived it."""
        for zygote in self._zygotes.values():
            zygote.close()
        limit = time.monotonic() + 2.0
        while marked_processes(self.marker) and time.monotonic() < limit:
            time.sleep(0.02)
        left_behind = end_marked_processes(self.marker)
        os.environ.pop(self.marker, None)
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        self._reaper.wait(timeout=30.0)
        return left_behind


_session: Session | None = None


def current_session() -> Session:
    """The session of this pytest process, created when first asked for."""
    global _session
    if _session is None:
        _session = Session()
    return _session


def close_session() -> list[str]:
    """End the session, if there is one; returns the command lines of processes that had outlived it."""
    global _session
    session, _session = _session, None
    return session.close() if session else []


def run_ranks(
    nprocs: int,
    fn: Callable[..., Any],
    *,
    timeout: float = 60.0,
    flavour: str = "core",
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(**kwargs)` on `nprocs` ranks, each in its own forked process, and return the results by rank.

    The ranks find RANK, WORLD_SIZE, MASTER_ADDR and so on in their environment, as under torchrun, and may call
    `init_gloo()` or `init_process_group` with `env://`. When a rank fails, its peers are ended within about a second.
    What the ranks print is shown by pytest when the test fails.

    Args:
        nprocs: number of ranks.
        fn: function at module level; the ranks import it by name.
        timeout: seconds that the case may take.
        flavour: what is imported beforehand, "core" (torch), "megatron" or "deepspeed".
        env: more environment variables for the ranks.
        **kwargs: arguments of `fn`, picklable.

    Returns:
        What `fn` returned on each rank (picklable); None for a rank that left by `sys.exit(0)`.

    Raises:
        RanksFailedError: a rank raised, exited with another code than 0, died or hung, or a process outlived the case.
    """
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise ValueError(f"run_ranks got {fn.__qualname__}, which ranks cannot import: define it at module level.")
    session = current_session()
    case = Case(
        target=f"{fn.__module__}:{fn.__qualname__}",
        kwargs=kwargs,
        nprocs=nprocs,
        timeout_s=timeout,
        environment={**_chosen_by_the_test(), **(env or {})},
        directory=session.new_directory(),
    )
    try:
        outcome = session.run(case, flavour)
        reports = [_report(case, outcome, rank) for rank in range(nprocs)]
        if outcome.timed_out or outcome.left_behind or any(report.state != "returned" for report in reports):
            raise RanksFailedError(case, outcome, reports)
        for report in reports:
            if report.output:
                print(f"--- rank {report.rank} of {case.target}\n{report.output[-OUTPUT_TAIL:]}")
        return [pickle.loads(case.result_path(rank).read_bytes()) for rank in range(nprocs)]
    finally:
        shutil.rmtree(case.directory, ignore_errors=True)


def _chosen_by_the_test() -> dict[str, str]:
    """Variables of this package: a zygote has those of the time when it was started."""
    return {name: value for name, value in os.environ.items() if name in ("HP_TRANSPORT", "HP_NATIVE_LIBRARY")}


def _report(case: Case, outcome: Outcome, rank: int) -> RankReport:
    def text(path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""

    end = outcome.ranks[rank]
    return RankReport(rank, end.state, end.exit_code, text(case.error_path(rank)), text(case.log_path(rank)))
