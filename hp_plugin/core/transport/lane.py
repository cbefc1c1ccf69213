"""A lane: the queue on which what follows a reduce-scatter is issued, so that the computing thread never waits for it.

On a device a lane is a stream. On the CPU, where the collectives of gloo block whoever waits for them, it is a thread.
Either way jobs run one after another in the order of submission. The order of collectives within a process group must
be the same on all its ranks, and only one thread may issue them, so there is one lane per process group, whoever uses
it: two models that share a group share its lane.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hp_plugin.core.devices import Device, backend_capabilities, get_device

Job = Callable[[], None]


class Ticket(Protocol):
    """A submitted job."""

    @property
    def is_done(self) -> bool:
        """Whether the job has run."""

    def wait(self) -> None:
        """Orders what the caller does next behind the job. Raises what the job raised."""


class Lane(Protocol):
    """A queue of jobs that run in the order of submission."""

    def submit(self, job: Job) -> Ticket:
        """Queues `job`. It must not wait for a job that is submitted later."""

    def protect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of `tensors`, once dropped, from being reused before the jobs of now are done."""


def lane_of(group: dist.ProcessGroup | None, device_type: str, *, role: str = "reduce") -> Lane:
    """The lane of `group`; None, a group of one rank, needs no queue. Local: no communication.

    Args:
        group: The group.
        device_type: Of the tensors in its collectives.
        role: What is queued on it. A group has one lane for each role; theirs must not depend on one another's order.
    """
    if group is None:
        return _INLINE
    lanes = _LANES.setdefault(group, {})
    if role not in lanes:
        lanes[role] = _new_lane(group, get_device(device_type), role)
    return lanes[role]


def _new_lane(group: dist.ProcessGroup, device: Device, role: str) -> Lane:
    if device.has_streams:
        return StreamLane(device)
    if not backend_capabilities(group).waits_on_host:
        return _INLINE
    return ThreadLane(group, role)


# ---- in place -------------------------------------------------------------------------------------------------------


class _Done:
    is_done = True

    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class InlineLane:
    """Runs every job at once: for back ends whose collectives neither block nor run beside the caller."""

    def submit(self, job: Job) -> Ticket:
        """Runs `job`."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                job()
        else:
            job()
        return _DONE

    def protect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing runs later."""


_INLINE = InlineLane()
# A property of the groups, not of any model; see the module's docstring. Entries end with their group.
_LANES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Lane]] = weakref.WeakKeyDictionary()


# ---- a thread -------------------------------------------------------------------------------------------------------


class _ThreadTicket:
    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def settle(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadLane:
    """Jobs run on a thread of this lane, beside the caller.

    Torch's dispatch modes belong to a thread. A job runs under those that were active where it was submitted, so that
    a recorder of collectives sees those of the lane too.

    Args:
        group: The lane ends when the group is garbage collected.
        role: Names the thread.
    """

    def __init__(self, group: dist.ProcessGroup, role: str = "reduce") -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, list[Any], _ThreadTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=f"hyperfsdp-{role}", daemon=True)
        self._thread.start()
        weakref.finalize(group, self._jobs.put, None).atexit = False

    def submit(self, job: Job) -> Ticket:
        """Queues `job`."""
        ticket = _ThreadTicket()
        self._jobs.put((job, _get_current_dispatch_mode_stack(), ticket))
        return ticket

    def protect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Host memory lives as long as it is referred to, and jobs hold what they use."""


def _run(jobs: queue.SimpleQueue[tuple[Job, list[Any], _ThreadTicket] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, modes, ticket = entry
        error: BaseException | None = None
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                job()
        except BaseException as caught:  # delivered to whoever waits for the job, on the thread that computes
            error = caught
        # Drop what the job holds before whoever waits may look at the memory.
        del entry, job, modes
        ticket.settle(error)
        del ticket, error


# ---- a stream -------------------------------------------------------------------------------------------------------


class _StreamTicket:
    def __init__(self, device: Device, event: Any) -> None:
        self._device = device
        self._event = event

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._event)


class StreamLane:
    """Jobs are queued on a stream of this lane; the calling thread issues everything.

    Args:
        device: The kind of device on which the stream is made.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream(high_priority=True)

    def submit(self, job: Job) -> Ticket:
        """Queues the device work of `job` behind what the current stream has queued so far."""
        self._stream.wait_stream(self._device.current_stream())
        with torch.no_grad(), self._device.use_stream(self._stream):
            job()
            event = self._device.new_event()
            event.record(self._stream)
        return _StreamTicket(self._device, event)

    def protect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tells the caching allocator that the stream reads `tensors`."""
        for tensor in tensors:
            tensor.record_stream(self._stream)  # type: ignore[arg-type]  # the device's own stream class
