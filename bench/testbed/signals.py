"""Signals that would end the tool become exceptions, so that `finally` and `with` run and the testbed is removed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class EndingSignals:
    """Turns SIGTERM and SIGHUP into SystemExit and SIGINT into KeyboardInterrupt while a testbed exists.

    Only the first counts: from then on they are ignored until the testbed is gone and the former handlers are back.
    Handlers can be set from the main thread only; elsewhere this does nothing, and the main thread must see to it.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def catch(self) -> None:
        """Install the handlers."""
        self._install(self._end)

    def ignore(self) -> None:
        """Ignore the signals while the testbed is removed: a second Ctrl-C must not leave half of it behind."""
        self._install(signal.SIG_IGN)

    def restore(self) -> None:
        """Put the former handlers back."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _install(self, handler: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _ENDING:
            previous = signal.signal(number, handler)
            self._previous.setdefault(number, previous)

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        self.ignore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
