"""Counters in a segment through which ranks tell one another how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from hp_plugin.core.transport.shm.errors import PeerError, named
from hp_plugin.core.transport.shm.segment import Segment

LINE_BYTES = 64
"""A counter is alone in its cache line."""
_LOOKS = 200
"""How often a waiter looks before it sleeps: a few microseconds, since there may be more ranks than cores."""
_SLICE_US = 100_000
"""How long a wait stays in native code before Python may handle a signal and look whether the peer lives."""


def signal_bytes(rows: int, ranks: int) -> int:
    """Bytes of a table of counters."""
    return rows * ranks * LINE_BYTES


class Signals:
    """A table of counters, `rows` by ranks of the group. A rank raises its own column and waits for whole rows.

    Counters start at 0 and only rise; they are compared as distances, so they may wrap around.

    Args:
        segment: Where the table lies.
        offset: First byte of the table.
        timeout_s: How long a rank that lives is waited for.
    """

    def __init__(self, segment: Segment, offset: int, *, timeout_s: float) -> None:
        self._segment = segment
        self._first = segment.address + offset
        self._row_bytes = segment.size * LINE_BYTES
        self._own = self._first + segment.rank * LINE_BYTES
        self._publish = segment.native.hp_counter_publish
        self._wait = segment.native.hp_counters_wait
        self._timeout_s = timeout_s
        self.failure: BaseException | None = None
        """What ended the thread on which this rank's own counters are raised."""

    def publish(self, row: int, value: int) -> None:
        """Raises this rank's counter of `row` to `value`: what was written before is visible to who sees it."""
        self._publish(self._own + row * self._row_bytes, value & 0xFFFFFFFF)

    def has_reached(self, row: int, target: int) -> bool:
        """Whether every rank's counter of `row` is at `target` or beyond. Does not wait."""
        return self._look(row, target, 0) == -1

    def wait(self, row: int, target: int, what: Callable[[], str]) -> None:
        """Waits until every rank's counter of `row` is at `target` or beyond.

        Args:
            row: The row.
            target: The value.
            what: What a rank that is behind was to do, and for which unit and phase, for the message.

        Raises:
            PeerError: A rank has ended, or did not follow within the timeout.
        """
        if self._look(row, target, _SLICE_US) == -1:
            return
        deadline = time.monotonic() + self._timeout_s
        while self._look(row, target, _SLICE_US) != -1:
            self._check_peers(row, target, what)
            if time.monotonic() > deadline:
                self._give_up(row, target, what)

    def _look(self, row: int, target: int, slice_us: int) -> int:
        first = self._first + row * self._row_bytes
        behind: int = self._wait(first, self._segment.size, LINE_BYTES, target & 0xFFFFFFFF, slice_us, _LOOKS)
        return behind

    def _is_behind(self, row: int, target: int, rank: int) -> bool:
        counter = self._first + row * self._row_bytes + rank * LINE_BYTES
        return bool(self._wait(counter, 1, LINE_BYTES, target & 0xFFFFFFFF, 0, 0) != -1)

    def _behind(self, row: int, target: int) -> list[int]:
        """The other ranks that are behind; this one alone where it is the only one."""
        ranks = [rank for rank in range(self._segment.size) if self._is_behind(row, target, rank)]
        return [rank for rank in ranks if rank != self._segment.rank] or ranks

    def _check_peers(self, row: int, target: int, what: Callable[[], str]) -> None:
        """Raises PeerError where a rank that is behind will stay so."""
        segment, own, failure = self._segment, dist.get_rank(), self.failure
        if isinstance(failure, PeerError):
            raise PeerError(f"{failure}") from failure
        if failure is not None:
            raise PeerError(
                f"rank {own} itself failed to add up gradients: {type(failure).__name__}: {failure}"
            ) from failure
        ended = [rank for rank in self._behind(row, target) if rank != segment.rank and not segment.is_alive(rank)]
        ended = [rank for rank in ended if self._is_behind(row, target, rank)]  # else it did its part, and ended then
        if ended:
            names = named(segment.group, ended)
            verb = "has" if len(ended) == 1 else "have"
            raise PeerError(f"rank {own} waited for {names} to {what()}, but {names} {verb} ended")

    def _give_up(self, row: int, target: int, what: Callable[[], str]) -> None:
        ranks = self._behind(row, target)
        if not ranks:
            return
        names = named(self._segment.group, ranks)
        state = "lives: it is" if len(ranks) == 1 else "live: they are"
        raise PeerError(
            f"rank {dist.get_rank()} waited {self._timeout_s:.0f} s, the timeout of the process group, for {names} "
            f"to {what()}. {names.capitalize()} {state} stopped, stuck, or in another place of the program"
        )
