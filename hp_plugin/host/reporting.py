"""What the adapter says to a person: lines printed once per job, and sentences that end it."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import NoReturn, TextIO

USAGE_ERROR = 2
"""Exit status of a job that was refused before it started, as with argparse."""

_RANK_ZERO_HEAD_START_S = 2.0


def rank() -> int:
    """Global rank of this process as the launcher set it; 0 when there is none."""
    return int(os.environ.get("RANK", "0"))


def say(line: str) -> None:
    """Print ``line`` on global rank 0 only, prefixed with the name of this package."""
    if rank() == 0:
        _write(sys.stdout, f"hp_plugin: {line}")


def say_here(line: str) -> None:
    """Print ``line`` on the rank that calls, prefixed with the name of this package."""
    _write(sys.stdout, f"hp_plugin: {line}")


class _OnRankZero(logging.Handler):
    """Says what the package logs, as lines of the job's output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record on global rank 0."""
        say(record.getMessage())


def show_log() -> None:
    """Shows what the core logs: the transport chosen, the sizes of shared memory, the measured link.

    A job that has handlers of its own gets the records there, any other sees rank 0's in its output.
    """
    logger = logging.getLogger("hp_plugin")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(_OnRankZero(logging.INFO))


def stop(sentence: str, *, status: int = USAGE_ERROR, every_rank: bool = False) -> NoReturn:
    """End this process with ``sentence`` on standard error and a non-zero status, without a traceback.

    Args:
        sentence: What was found, what was expected, what to change.
        status: Exit status; never 0.
        every_rank: False when all ranks find the same thing, so that rank 0 alone speaks. True when
            the cause may be visible to this rank only; ranks other than 0 then say who they are.

    Raises:
        SystemExit: Always, with ``status``.
    """
    me = rank()
    if me != 0:
        # A launcher ends all ranks as soon as one has failed. Rank 0 is the one that explains, so it goes first.
        time.sleep(_RANK_ZERO_HEAD_START_S)
    if me == 0 or every_rank:
        who = f" [rank {me}]" if me else ""
        _write(sys.stderr, f"hp_plugin: error{who}: {sentence}")
    raise SystemExit(status)


def _write(stream: TextIO, line: str) -> None:
    # In one piece: torchrun starts its ranks unbuffered and with one output; `print` writes the end of a line apart.
    stream.write(f"{line}\n")
    stream.flush()
