"""Errors that end a benchmark with a sentence instead of a traceback."""

from __future__ import annotations


class BenchError(Exception):
    """What was found, what was expected, what to change. `python -m bench` prints it and leaves with `exit_code`."""

    exit_code = 1


class UnavailableError(BenchError):
    """This machine cannot run what was asked for: permissions, programs, kernel features, modules."""

    exit_code = 2
