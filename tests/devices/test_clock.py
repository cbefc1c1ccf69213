"""The clock of streams: what it gives out, when, and that it never makes the host wait."""

from __future__ import annotations

from typing import Any

import pytest

from hp_plugin.core.devices import CpuDevice, StreamClock
from hp_plugin.core.fsdp.counters import Counters, WaitCause


class FakeEvent:
    """An event of a stream that passes `at` milliseconds of device time; not before the device has come there."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._at = 0.0

    def record(self) -> None:
        self._at = self._device.queued_until

    def query(self) -> bool:
        return self._device.has_come_to >= self._at

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return end._at - self._at


class FakeDevice(CpuDevice):
    """Device time in milliseconds: how far work is queued, and how far it has been done."""

    has_streams = True

    def __init__(self) -> None:
        self.queued_until = self.has_come_to = 0.0
        self.events = 0

    def new_event(self, *, timed: bool = False) -> Any:
        assert timed
        self.events += 1
        return FakeEvent(self)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def test_seconds_are_those_of_the_stream_and_appear_when_it_has_passed_them(device: FakeDevice) -> None:
    counters = Counters(clock=StreamClock(device))
    for cause, milliseconds in ((WaitCause.ALL_GATHER, 5.0), (WaitCause.WINDOW, 7.0), (WaitCause.ALL_GATHER, 1.0)):
        device.queued_until += 100.0  # computation
        with counters.waiting(cause):
            device.queued_until += milliseconds
    counters.collect_waits()
    assert {cause: wait.count for cause, wait in counters.waits.items() if wait.count} == {"all_gather": 2, "window": 1}
    assert all(wait.seconds == 0 for wait in counters.waits.values())
    device.has_come_to = 250.0
    counters.collect_waits()
    assert counters.waits["all_gather"].seconds == pytest.approx(0.005)
    assert counters.waits["window"].seconds == pytest.approx(0.007)
    device.has_come_to = device.queued_until
    counters.collect_waits()
    counters.collect_waits()
    assert counters.waits["all_gather"].seconds == pytest.approx(0.006)


def test_events_are_used_again(device: FakeDevice) -> None:
    counters = Counters(clock=StreamClock(device))
    for _ in range(10):
        with counters.waiting(WaitCause.ALL_GATHER):
            device.queued_until += 1.0
        device.has_come_to = device.queued_until
        counters.collect_waits()
    assert device.events == 2
    assert counters.waits["all_gather"].seconds == pytest.approx(0.010)


def test_a_reset_forgets_waits_that_are_open_and_keeps_the_clock(device: FakeDevice) -> None:
    counters = Counters(clock=StreamClock(device))
    with counters.waiting(WaitCause.WINDOW):
        device.queued_until += 3.0
    clock = counters.clock
    counters.reset()
    device.has_come_to = device.queued_until
    counters.collect_waits()
    assert counters.waits["window"].seconds == 0
    assert counters.waits["window"].count == 0
    assert counters.clock is clock


def test_without_a_clock_the_host_is_timed() -> None:
    counters = Counters()
    with counters.waiting(WaitCause.WINDOW):
        pass
    counters.collect_waits()
    assert 0 < counters.waits["window"].seconds < 60
