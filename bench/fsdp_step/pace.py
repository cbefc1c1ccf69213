"""The modelled accelerator: a wait without the GIL, as long as the accelerator would take, and a count of all waits."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass

_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None)  # CDLL, not PyDLL: its calls release the GIL


def wait_until(deadline_ns: int) -> None:
    """Blocks this thread until CLOCK_MONOTONIC reaches `deadline_ns`; other Python threads run meanwhile."""
    moment = _Timespec(*divmod(deadline_ns, _NANOSECONDS))
    # A signal ends the call early; the deadline is absolute, so it is simply called again.
    while time.monotonic_ns() < deadline_ns:
        code = _libc.clock_nanosleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(moment), None)
        if code not in (0, 4):  # 4: EINTR
            raise OSError(code, f"clock_nanosleep: {os.strerror(code)}")


@dataclass
class Pace:
    """How long the modelled accelerator takes for a layer, shared by all variants of a process.

    Attributes:
        layer_s: seconds of a layer's forward; its backward takes twice that.
        calls: waits since `reset`.
        seconds: what they were asked to take together.
    """

    layer_s: float = 0.0
    calls: int = 0
    seconds: float = 0.0

    def begin(self, share: float) -> int:
        """Starts a piece of work of `share` forward times of a layer; returns its end on CLOCK_MONOTONIC, in ns."""
        duration = share * self.layer_s
        self.calls += 1
        self.seconds += duration
        return time.monotonic_ns() + round(duration * _NANOSECONDS)

    def reset(self) -> None:
        """Forgets what was counted."""
        self.calls, self.seconds = 0, 0.0
