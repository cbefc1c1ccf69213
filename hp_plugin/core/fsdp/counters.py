"""What the engine did, as plain integers that a test can hold against a formula, and for what it waited."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hp_plugin.core.devices import StreamClock
from hp_plugin.core.fsdp.ranges import profiler_range


class WaitCause(str, enum.Enum):
    """Why the thread that computes waited; in two cases, which say so, the lane beside it."""

    ALL_GATHER = "all_gather"
    """For the parameters of the unit that runs next. Unavoidable where the gather is late."""
    REDUCE_SCATTER = "reduce_scatter"
    """For the reduce-scatter of the unit before, whose operands are to go before this unit's begin to travel."""
    PEERS = "peers"
    """The lane, or an optimizer, waited for ranks of the supernode that still read the shared parameters of a unit."""
    RING = "ring"
    """The lane waited for a place to write gradients: the ring holds what ranks of the supernode have not added up."""
    WINDOW = "window"
    """For a buffer that holds sums that cross between supernodes: all that the window allows do, or those of an earlier
    backward of the same unit."""
    END_OF_BACKWARD = "end_of_backward"
    """For the reductions that are still under way when the last gradient has been computed."""


@dataclass
class Wait:
    """Waits of one cause.

    Attributes:
        count: How many.
        seconds: On CPU, in which the thread waited. On a device, in which the computing stream stood still: of waits
            that it has passed when this was last collected.
    """

    count: int = 0
    seconds: float = 0.0


def _no_waits() -> dict[str, Wait]:
    return {cause.value: Wait() for cause in WaitCause}


@dataclass
class Counters:
    """Totals of one root module on this rank since the last `reset()`.

    Bytes are those of the operands as this rank sees them (the full tensor of an all-gather or reduce-scatter, the
    buffer of an all-reduce), not what an algorithm puts on the wire; see `hp_plugin.core.topology.traffic` for that.
    """

    all_gathers: int = 0
    """Units gathered inside the supernode."""
    reduce_scatters: int = 0
    """Units reduced inside the supernode."""
    all_reduces: int = 0
    """Reductions between supernodes: messages, each of one bucket."""
    owner_reductions: int = 0
    """Exchanges between supernodes of buckets of which some gradients are summed on one replica alone."""
    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    owner_reduction_bytes: int = 0
    """Of sums that one replica alone wants."""
    copied_bytes: int = 0
    """Bytes written by copies of our own: casts, padding, packs, shards on an inner dim; on gloo also this
    rank's own slot of a full tensor, which other back ends copy themselves."""
    gradient_dtensors_built: int = 0
    """DTensor wrappers constructed for `.grad`: one per parameter and buffer, none in a steady step."""
    waits: dict[str, Wait] = field(default_factory=_no_waits)
    """Waits of the thread, or on a device of the stream, that computes, by the value of their `WaitCause`."""
    clock: StreamClock | None = field(default=None, repr=False, compare=False)
    """Times waits on a device; None: the host's clock does."""

    @contextlib.contextmanager
    def waiting(self, cause: WaitCause) -> Iterator[None]:
        """Counts what runs inside as one wait."""
        start = self.start_wait()
        try:
            with profiler_range("wait for", cause.value):
                yield
        finally:
            self.waited(cause, start)

    def start_wait(self) -> Any:
        """The moment at which a wait begins, for `waited`."""
        return time.perf_counter() if self.clock is None else self.clock.now()

    def waited(self, cause: WaitCause, since: Any) -> None:
        """Counts a wait that began at `since`, which `start_wait` gave; cheaper than `waiting`."""
        wait = self.waits[cause.value]
        wait.count += 1
        if self.clock is None:
            wait.seconds += time.perf_counter() - since
        else:
            self.clock.measure(cause.value, since)

    def collect_waits(self) -> None:
        """Adds the seconds of waits that the device has passed by now. The host does not wait for it."""
        if self.clock is not None:
            for cause, seconds in self.clock.finished():
                self.waits[cause].seconds += seconds

    def reset(self) -> None:
        """Sets every counter to zero."""
        fresh = Counters(clock=self.clock)
        if self.clock is not None:
            self.clock.forget()
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))
