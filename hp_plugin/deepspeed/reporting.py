"""What the adapter says to a person, on rank 0, through the logger of the package."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

_LOG = logging.getLogger("hp_plugin")


def rank() -> int:
    """Global rank of this process as the launcher set it; 0 when there is none."""
    return int(os.environ.get("RANK", "0"))


class _OnRankZero(logging.Handler):
    """Says what the package logs, as lines of the job's output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record on global rank 0."""
        if rank() == 0:
            print(f"hp_plugin: {record.getMessage()}", flush=True)


def show_log() -> None:
    """Shows what the package logs; a job that has handlers of its own gets the records there."""
    if _LOG.level == logging.NOTSET:
        _LOG.setLevel(logging.INFO)
    if not _LOG.hasHandlers():
        _LOG.addHandler(_OnRankZero(logging.INFO))


def say(line: str) -> None:
    """Log `line`, which rank 0 shows."""
    _LOG.info(line)


def stop(sentence: str, *, status: int = 2) -> NoReturn:
    """End this process with `sentence` on standard error and a non-zero status, without a traceback."""
    print(f"hp_plugin: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(status)
