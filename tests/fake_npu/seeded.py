"""Faults put into the engine while it runs: each breaks one thing that keeps streams in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from hp_plugin.core.fsdp.fulls import GatheredFulls
from hp_plugin.core.fsdp.owner_reduction import OwnerReduction
from hp_plugin.core.fsdp.reduction import Crossing, ReductionPipeline
from hp_plugin.core.transport.c10d import C10dTransport
from hp_plugin.core.transport.lane import StreamLane, _StreamTicket
from hp_plugin.core.transport.messages import PendingOrderedSum


@dataclass(frozen=True)
class Seeded:
    """One fault.

    Attributes:
        schedule: In which of `schedules.SCHEDULES` it shows.
        rule: Of `happens_before` that finds it.
        patch: Makes the context in which the engine has it.
    """

    schedule: str
    rule: str
    patch: Callable[[], AbstractContextManager[Any]]


def _nothing(*_: Any) -> None:
    """Unlike a mock it keeps no tensor that it was called with."""


def _gather_is_not_waited_for() -> AbstractContextManager[Any]:
    original = GatheredFulls.wait

    def wait(self: GatheredFulls, root: Any) -> None:
        if self._gather is not None:
            self._gather._works = ()
        original(self, root)

    return mock.patch.object(GatheredFulls, "wait", wait)


def _gather_leaves_from_another_stream() -> AbstractContextManager[Any]:
    original = GatheredFulls.begin

    def begin(self: GatheredFulls, root: Any, *, for_backward: bool) -> bool:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        with npu.stream(npu.Stream()):
            return original(self, root, for_backward=for_backward)

    return mock.patch.object(GatheredFulls, "begin", begin)


def _lane_ignores_the_reduce_scatter() -> AbstractContextManager[Any]:
    original = C10dTransport.reduce_scatter

    def reduce_scatter(self: C10dTransport, outputs: Any, inputs: Any) -> Any:
        pending = original(self, outputs, inputs)
        pending._works = ()
        return pending

    return mock.patch.object(C10dTransport, "reduce_scatter", reduce_scatter)


def _lane_does_not_follow_the_computing_stream() -> AbstractContextManager[Any]:
    def submit(self: StreamLane, job: Callable[[], None]) -> _StreamTicket:
        with torch.no_grad(), self._device.use_stream(self._stream):
            job()
            event = self._device.new_event()
            event.record(self._stream)
        return _StreamTicket(self._device, event)

    return mock.patch.object(StreamLane, "submit", submit)


def _event_is_recorded_before_its_job() -> AbstractContextManager[Any]:
    def submit(self: StreamLane, job: Callable[[], None]) -> _StreamTicket:
        self._stream.wait_stream(self._device.current_stream())
        with torch.no_grad(), self._device.use_stream(self._stream):
            event = self._device.new_event()
            event.record(self._stream)
            job()
        return _StreamTicket(self._device, event)

    return mock.patch.object(StreamLane, "submit", submit)


def _tickets_do_not_wait() -> AbstractContextManager[Any]:
    return mock.patch.object(_StreamTicket, "wait", _nothing)


def _operands_are_not_kept() -> AbstractContextManager[Any]:
    return mock.patch.object(StreamLane, "protect", _nothing)


def _received_slices_are_not_kept() -> AbstractContextManager[Any]:
    original = PendingOrderedSum.__init__

    def init(self: PendingOrderedSum, *arguments: Any) -> None:
        original(self, *arguments)
        self.temporaries = ()

    return mock.patch.object(PendingOrderedSum, "__init__", init)


def _sums_are_delivered_before_they_have_crossed() -> AbstractContextManager[Any]:
    original = Crossing.finish

    def finish(self: Crossing) -> None:
        for pending, _, _ in self.messages:
            pending._works = ()
        original(self)

    return mock.patch.object(Crossing, "finish", finish)


def _owners_do_not_wait_for_the_exchange() -> AbstractContextManager[Any]:
    original = OwnerReduction.wait

    def wait(self: OwnerReduction) -> None:
        self._exchange._works = ()
        original(self)

    return mock.patch.object(OwnerReduction, "wait", wait)


def _backward_waits_for_every_crossing() -> AbstractContextManager[Any]:
    original = ReductionPipeline.submit

    def submit(self: ReductionPipeline, *arguments: Any) -> None:
        original(self, *arguments)
        self._finish_until(lambda: False)

    return mock.patch.object(ReductionPipeline, "submit", submit)


def _waits_for_the_window_are_not_counted() -> AbstractContextManager[Any]:
    def make_room(self: ReductionPipeline) -> None:
        self._finish_until(lambda: self._sides_crossing() < self.window)

    return mock.patch.object(ReductionPipeline, "_make_room", make_room)


SEEDED: dict[str, Seeded] = {
    "gather is not waited for": Seeded("plain", "unordered", _gather_is_not_waited_for),
    "gather leaves from another stream": Seeded("plain", "unordered", _gather_leaves_from_another_stream),
    "lane ignores the reduce-scatter": Seeded("plain", "unordered", _lane_ignores_the_reduce_scatter),
    "lane does not follow the computing stream": Seeded(
        "replicas alone", "unordered", _lane_does_not_follow_the_computing_stream
    ),
    "event is recorded before its job": Seeded("one replica", "unordered", _event_is_recorded_before_its_job),
    "tickets do not wait": Seeded("one replica", "unordered", _tickets_do_not_wait),
    "operands are not kept": Seeded("plain", "reused", _operands_are_not_kept),
    "received slices are not kept": Seeded("deterministic", "reused", _received_slices_are_not_kept),
    "sums are delivered before they have crossed": Seeded(
        "plain", "unordered", _sums_are_delivered_before_they_have_crossed
    ),
    "owners do not wait for the exchange": Seeded(
        "muon, gradients to owners", "unordered", _owners_do_not_wait_for_the_exchange
    ),
    "backward waits for every crossing": Seeded(
        "one bucket for each unit", "slow link", _backward_waits_for_every_crossing
    ),
    "waits for the window are not counted": Seeded(
        "three micro-batches, window of one", "slow link", _waits_for_the_window_are_not_counted
    ),
}
