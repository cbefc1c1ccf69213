"""How the ranks of a plan compare notes: real processes over their groups, or simulated ranks over shared memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hp_plugin.core.dtensor.collectives import AxisGroup
from hp_plugin.core.dtensor.validation.arrangement import Grid


class Exchange(Protocol):
    """What the checks need of the ranks around them."""

    grid: Grid

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks of the plan's axes, in row-major order. Every one of them must call."""
        ...

    def tell(self, value: Any) -> list[Any]:
        """As `gather`, by a rank that fails and does not know whether the others listen."""
        ...

    def random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, torch's default generator is this rank's own."""
        ...


class ProcessExchange:
    """Ranks are processes; objects go over the groups of the plan's axes.

    Args:
        lines: the plan's axes, in the order of the mesh.
    """

    def __init__(self, lines: Sequence[AxisGroup]) -> None:
        self._lines = list(lines)
        self.grid = Grid(
            tuple(line.axis for line in lines), tuple(line.size for line in lines), tuple(line.rank for line in lines)
        )

    def gather(self, value: Any) -> list[Any]:
        """See `Exchange`."""
        gathered = [value]
        for line in reversed(self._lines):
            if line.size > 1:
                received: list[Any] = [None] * line.size
                dist.all_gather_object(received, (line.rank, gathered), group=line.group)
                gathered = [item for _, part in sorted(received, key=lambda pair: pair[0]) for item in part]
        return gathered

    def tell(self, value: Any) -> list[Any]:
        """See `Exchange`: others that wait in another collective end with the time limit of their group."""
        return self.gather(value)

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """See `Exchange`: a process has its own generator anyway."""
        yield


class Meeting:
    """Threads meet here and leave with what all of them brought.

    Args:
        size: number of threads.
        timeout_s: how long one waits for the others.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._timeout_s = timeout_s

    def exchange(self, index: int, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Brings `value` as member `index`. Raises `threading.BrokenBarrierError` if a member never comes."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._slots[index] = value
        self._barrier.wait(limit)
        values = list(self._slots)
        self._barrier.wait(limit)  # nobody writes the next value before all have read this one
        return values

    def abort(self) -> None:
        """Lets all who wait here fail."""
        self._barrier.abort()


class ThreadExchange:
    """Ranks are threads of one process.

    Args:
        grid: as this rank sees it.
        meeting: of all ranks of the grid.
        generator_lock: torch's default generator is one for the process; who draws holds the lock.
        seed: of the rank's own numbers.
    """

    def __init__(self, grid: Grid, meeting: Meeting, generator_lock: threading.Lock, seed: int) -> None:
        self.grid = grid
        self._meeting = meeting
        self._lock = generator_lock
        self._state = torch.Generator().manual_seed(seed).get_state()

    def gather(self, value: Any) -> list[Any]:
        """See `Exchange`."""
        return self._meeting.exchange(self.grid.index, value)

    def tell(self, value: Any) -> list[Any]:
        """See `Exchange`: the failure of a thread wakes the others up, so that there is no use in a long wait."""
        return self._meeting.exchange(self.grid.index, value, timeout_s=2.0)

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """See `Exchange`."""
        with self._lock:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = torch.get_rng_state()
                torch.set_rng_state(outside)
