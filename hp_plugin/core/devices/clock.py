"""How long a stream stood still: events before and after a wait, read once the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from hp_plugin.core.devices.device import Device


class StreamClock:
    """Times what the current stream waits for, without making the host wait.

    Args:
        device: A kind of device that has streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._open: deque[tuple[str, Any, Any]] = deque()

    def now(self) -> Any:
        """A mark behind what the current stream has queued so far."""
        event = self._free.pop() if self._free else self._device.new_event(timed=True)
        event.record()
        return event

    def measure(self, name: str, since: Any) -> None:
        """What the current stream has queued since the mark `since` was a wait. Each mark may be used once.

        Args:
            name: Under which it is handed out again.
            since: A mark of `now`.
        """
        self._open.append((name, since, self.now()))

    def finished(self) -> Iterator[tuple[str, float]]:
        """Takes out the waits that the stream has passed, in order: name and seconds. Does not wait for others."""
        while self._open and self._open[0][2].query():
            name, start, end = self._open.popleft()
            yield name, start.elapsed_time(end) / 1e3
            self._free += [start, end]

    def forget(self) -> None:
        """Drops the waits that have not been taken out."""
        self._open.clear()
