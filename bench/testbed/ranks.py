"""The ranks of one run: started each in its namespace, watched, and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.errors import BenchError

_ENTER = Path(__file__).with_name("enter.py")
_POLL_S = 0.03
_PEER_GRACE_S = 1.0  # after the first failure: time for peers to report their own
_OUTPUT_TAIL = 3000  # characters of a rank's output in an error


@dataclass(frozen=True)
class RankSpec:
    """How to start one rank."""

    rank: int
    namespace: str
    hostname: str
    environment: dict[str, str]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        rank: global rank.
        exit_code: code as `subprocess` gives it (negative: signal; -9 for one that was ended because another failed).
        stdout: what it printed.
        stderr: its messages.
        value: what it gave to `bench.testbed.worker.publish`; None if it gave nothing.
    """

    rank: int
    exit_code: int
    stdout: str
    stderr: str
    value: Any


class RanksFailedError(BenchError):
    """A rank left with another exit code than 0, or the time was up.

    Attributes:
        results: one per rank, in rank order.
        timed_out: whether the time limit ended the run.
        failed: ranks that failed by themselves, the first to fail first.
    """

    def __init__(self, results: list[RankResult], *, timed_out: bool, failed: list[int], timeout_s: float) -> None:
        self.results = results
        self.timed_out = timed_out
        self.failed = failed
        reason = f"did not finish within {timeout_s:g} s" if timed_out else f"failed on ranks {failed}, in this order"
        shown = results if timed_out else [results[rank] for rank in failed]
        super().__init__("\n".join([f"the run {reason}", *(_describe(result) for result in shown)]))


def _describe(result: RankResult) -> str:
    output = (result.stdout + result.stderr).strip()[-_OUTPUT_TAIL:]
    return f"--- rank {result.rank}: exit code {result.exit_code}\n{output}"


class Ranks:
    """A started run. `wait` ends it; `kill` must be called whatever happens."""

    def __init__(self, specs: Sequence[RankSpec], command: Sequence[str], *, directory: Path, working: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shown = 0
        try:
            for spec in specs:
                self._start(spec, command, working)
        except BaseException:
            self.kill()
            raise

    def _start(self, spec: RankSpec, command: Sequence[str], working: Path) -> None:
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), spec.namespace, spec.hostname]
        environment = {**spec.environment, "BENCH_RESULT": str(self._file(spec.rank, "json"))}
        with self._file(spec.rank, "out").open("wb") as out, self._file(spec.rank, "err").open("wb") as err:
            process = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=working,
                start_new_session=True,
            )
        self._processes.append(process)

    def _file(self, rank: int, kind: str) -> Path:
        return self._directory / f"rank{rank}.{kind}"

    def wait(self, timeout_s: float, *, show: TextIO | None) -> list[RankResult]:
        """Wait until all ranks have ended, or one has failed, or the time is up; then end the others.

        Args:
            timeout_s: limit for the whole run, in seconds.
            show: where rank 0's output is copied to while it runs; None for nowhere.

        Raises:
            RanksFailedError: not every rank left with 0 in time.
        """
        deadline = time.monotonic() + timeout_s
        failed: list[int] = []
        while True:
            running = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
            for rank, process in enumerate(self._processes):
                if process.returncode not in (None, 0) and rank not in failed:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _PEER_GRACE_S)
            self._show(show)
            if not running or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self.kill()
        self._show(show)
        results = [self._result(rank) for rank in range(len(self._processes))]
        if failed or running:
            raise RanksFailedError(results, timed_out=not failed, failed=failed, timeout_s=timeout_s)
        return results

    def kill(self) -> None:
        """End every rank with all processes of its session, and take up their exit codes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _show(self, stream: TextIO | None) -> None:
        if stream is None:
            return
        with self._file(0, "out").open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        if whole:
            self._shown += len(whole)
            stream.write(whole.decode(errors="replace"))
            stream.flush()

    def _result(self, rank: int) -> RankResult:
        def text(kind: str) -> str:
            return self._file(rank, kind).read_text(errors="replace")

        published = self._file(rank, "json")
        code = self._processes[rank].returncode
        value = json.loads(published.read_text()) if published.exists() else None
        return RankResult(rank, code, text("out"), text("err"), value)


def rank_environment(
    base: Mapping[str, str], *, rank: int, world_size: int, local_world_size: int, master: tuple[str, int]
) -> dict[str, str]:
    """The variables that torchrun would set, on top of `base`."""
    return {
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }
