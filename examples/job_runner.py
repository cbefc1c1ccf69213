"""Runs one Megatron job under torchrun, follows its log, and leaves nothing running behind."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "pretrain_gpt.py"
GRACE_S = 15.0
"""What torchrun gets to end its workers before they are killed."""

_NUMBER = r"([-+.\dE]+)"
_ITERATION = re.compile(rf"iteration +(\d+)/ *\d+ .*elapsed time per iteration \(ms\): {_NUMBER} .*lm loss: {_NUMBER}")
_EVALUATION = re.compile(rf"on (validation|test) set \| lm loss value: {_NUMBER}")
_OWN_ERROR = re.compile(r"^(?:hp_plugin: )?error(?: \[rank \d+\])?: (.+)$")
_PYTHON_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*)$")
_SUMMARY_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.errors"


class JobError(Exception):
    """A run that failed; the message is one sentence for the user."""


@dataclass
class RunLog:
    """What a run printed.

    Attributes:
        losses: iteration -> training loss.
        step_ms: iteration -> wall time of the iteration in milliseconds.
        evaluations: ``validation`` and ``test`` -> loss at the end.
    """

    losses: dict[int, float] = field(default_factory=dict)
    step_ms: dict[int, float] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)

    def read(self, line: str) -> int | None:
        """Take in one line of the log; returns the iteration that it reports, if it does."""
        if (match := _ITERATION.search(line)) is not None:
            iteration, loss = int(match[1]), float(match[3])
            if len(self.losses) == 1:
                # Megatron does not clear its running sum after the first iteration of a process, so that the second
                # printed loss is the mean of the first two.
                loss = 2 * loss - next(iter(self.losses.values()))
            self.losses[iteration], self.step_ms[iteration] = loss, float(match[2])
            return iteration
        if (match := _EVALUATION.search(line)) is not None:
            self.evaluations[match[1]] = float(match[2])
        return None


def run(
    title: str,
    *,
    ranks: int,
    arguments: Sequence[str],
    log_file: Path,
    timeout_s: float,
    on_iteration: Callable[[int, RunLog], None],
) -> RunLog:
    """Run ``pretrain_gpt.py`` through the hp_plugin launcher on ``ranks`` local processes.

    Args:
        title: What the run is called in messages.
        ranks: Number of processes.
        arguments: Megatron's arguments.
        log_file: Receives everything that the processes print.
        timeout_s: Wall time after which the run is ended.
        on_iteration: Called after each iteration that the log reports.

    Raises:
        JobError: The run failed or took too long. No process of it is left then.
    """
    marker = f"HP_DEMO_{uuid.uuid4().hex}"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
        # torchrun would start Python unbuffered, see `_environment`.
        "--no-python",
        sys.executable,
        "-m",
        "hp_plugin.megatron",
        str(SCRIPT),
        *arguments,
    ]
    log = RunLog()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "w", buffering=1, encoding="utf-8") as copy:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=_environment(marker)
        )
        try:
            for line in _lines(process, deadline=time.monotonic() + timeout_s):
                copy.write(line)
                iteration = log.read(line)
                if iteration is not None:
                    on_iteration(iteration, log)
            status = process.wait(timeout=GRACE_S)
        except TimeoutError:
            raise JobError(f"{title} did not finish within {timeout_s:.0f} s; its log is {log_file}") from None
        finally:
            _end(process, marker)
    if status != 0:
        raise JobError(f"{title} failed with exit status {status}: {failure_in(log_file)}; its log is {log_file}")
    return log


def failure_in(log_file: Path) -> str:
    """The most telling line of a failed run's log: a sentence of ours, else the first Python exception."""
    exceptions: list[str] = []
    with open(log_file, encoding="utf-8", errors="replace") as log:
        for line in log:
            if (match := _OWN_ERROR.match(line.strip())) is not None:
                return match[1].rstrip(".")
            match = _PYTHON_ERROR.match(line.strip())
            if match is not None and not match[1].startswith(_SUMMARY_OF_TORCHRUN):
                exceptions.append(match[1])
    # A full disk ends one rank; what the others then report about their lost peer says less.
    telling = [text for text in exceptions if "No space left" in text or "File too large" in text]
    return (telling or exceptions or ["no rank said why"])[0].rstrip(".")


def free_bytes(directory: Path) -> int:
    """Free space of the disk that holds ``directory``, which need not exist yet."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _environment(marker: str) -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The demo is the same on every machine: accelerators are hidden from it.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    environment = {**defaults, **os.environ, **hidden, marker: "1"}
    # All ranks write into one pipe. Unbuffered, a line leaves in pieces, between which those of another rank may fall;
    # as it is, standard error leaves line by line, and Megatron flushes what it prints.
    environment.pop("PYTHONUNBUFFERED", None)
    return environment


def _lines(process: subprocess.Popen[bytes], *, deadline: float) -> Iterator[str]:
    """Lines of the output as they come; raises TimeoutError at ``deadline``."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                break
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode(errors="replace") + "\n" for line in whole)
    if rest:
        yield rest.decode(errors="replace") + "\n"


def _end(process: subprocess.Popen[bytes], marker: str) -> None:
    """End torchrun and everything that it started. Workers have sessions of their own, hence the marker."""
    if process.poll() is None:
        process.terminate()  # torchrun passes it on to its workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    if process.poll() is None:
        process.kill()
    process.wait()
    for pid in _marked(marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()


def _marked(marker: str) -> list[int]:
    wanted, found = f"{marker}=1".encode(), []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found
