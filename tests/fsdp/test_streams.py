"""On a device, streams and events order every two uses of memory that must not run at once.

A fake device records what the engine asks of streams, events, collectives and the allocator; nothing here measures time
or runs on an accelerator. See `tests/fake_npu/happens_before.py` for the rules.
"""

from __future__ import annotations

import pytest

from tests.fake_npu import build, device
from tests.fake_npu.happens_before import (
    BACKWARD,
    COMPUTE,
    END_OF_BACKWARD,
    RESUME,
    WINDOW,
    Entry,
    check,
)
from tests.fake_npu.schedules import SCHEDULES, WORLD, Run, run_alone
from tests.fake_npu.seeded import SEEDED
from tests.support import run_ranks

needs_device = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
LANE, SLOW = 7, 8


def run_all() -> dict[str, tuple[Run, Run]]:
    """Every schedule, with events that are pending when they are asked and with ones that are not."""
    device.install()
    device.init_alone(WORLD)
    return {name: (run_alone(name), run_alone(name, events_are_pending=False)) for name in SCHEDULES}


def run_seeded() -> dict[str, Run]:
    """Every seeded fault."""
    device.install()
    device.init_alone(WORLD)
    return {name: run_alone(fault.schedule, tamper=fault.patch) for name, fault in SEEDED.items()}


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Run, Run]]:
    found: dict[str, tuple[Run, Run]] = run_ranks(1, run_all, timeout=280)[0]
    return found


@pytest.fixture(scope="module")
def seeded_runs() -> dict[str, Run]:
    found: dict[str, Run] = run_ranks(1, run_seeded, timeout=280)[0]
    return found


@needs_device
@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_read_before_its_event_or_reused_before_its_last_reader(
    runs: dict[str, tuple[Run, Run]], name: str
) -> None:
    for run in runs[name]:
        assert run.faults == []
        assert run.host_waits == 0, "the host must not wait for the device while backward runs"
        assert run.entries > 1000
        assert bool(run.crossings + run.to_owners) == (SCHEDULES[name].replicate > 1)


@needs_device
def test_the_schedules_reach_what_they_are_there_for(runs: dict[str, tuple[Run, Run]]) -> None:
    assert runs["three micro-batches, window of one"][0].waits["window"] > 0
    assert runs["no flush until the last"][0].waits["window"] > 0
    assert runs["plain"][0].waits["window"] == 0
    assert runs["plain"][0].waits["reduce_scatter"] > 0
    assert runs["plain"][1].waits["reduce_scatter"] == 0, "a reduction that is done is not waited for"
    assert runs["muon, gradients to owners"][0].to_owners > 0
    failed = runs["a backward that fails, one bucket for each unit"][0]
    assert failed.crossings > runs["one bucket for each unit"][0].crossings, "some had left when it failed"
    # Two steps; a block has two matrices and a pack. Gathered twice, reduced once: two launches fewer each time.
    assert runs["plain"][0].launches - runs["coalesced"][0].launches >= 2 * 4 * 3 * 2


@needs_device
def test_waits_are_timed_by_events_that_the_host_does_not_wait_for(runs: dict[str, tuple[Run, Run]]) -> None:
    for pending, passed in runs.values():
        assert pending.seconds == 0
        assert passed.seconds == pytest.approx(0.002 * sum(passed.waits.values())), "two milliseconds each"
        assert passed.seconds > 0


@needs_device
@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_found(seeded_runs: dict[str, Run], name: str) -> None:
    assert SEEDED[name].rule in {fault.rule for fault in seeded_runs[name].faults}, seeded_runs[name].faults[:3]


def test_there_are_at_least_ten_seeded_faults_and_every_rule_has_one() -> None:
    assert len(SEEDED) >= 10
    assert {fault.rule for fault in SEEDED.values()} == {"unordered", "reused", "slow link"}


# ---- the rules themselves, on logs of a few lines -------------------------------------------------------------------


def rules(*log: Entry) -> list[str]:
    return [fault.rule for fault in check(log, inter={SLOW})]


def use(kind: str, stream: int, start: int = 0, end: int = 8, memory: int = 1) -> Entry:
    return (kind, stream, memory, start, end, "kernel")


def on(kind: str, stream: int, subject: int = 5) -> Entry:
    return (kind, stream, subject, 0, 0, "")


def mark(name: str) -> Entry:
    return ("mark", COMPUTE, 0, 0, 0, name)


ORDER = (on("record", LANE), on("wait", COMPUTE))


def test_uses_of_two_streams_need_an_event_if_one_of_them_writes() -> None:
    assert rules(use("write", LANE), use("read", COMPUTE)) == ["unordered"]
    assert rules(use("read", LANE), use("write", COMPUTE)) == ["unordered"]
    assert rules(use("write", LANE), use("write", COMPUTE)) == ["unordered"]
    assert rules(use("read", LANE), use("read", COMPUTE)) == []
    assert rules(use("write", LANE), *ORDER, use("read", COMPUTE)) == []
    assert rules(*ORDER, use("write", LANE), use("read", COMPUTE)) == ["unordered"]
    assert rules(use("write", LANE, 0, 4), use("write", COMPUTE, 4, 8)) == []
    assert rules(use("write", COMPUTE), use("read", COMPUTE)) == []


def test_order_is_transitive_and_covers_all_that_came_before() -> None:
    through = (on("record", 3, 6), on("wait", LANE, 6), *ORDER)
    assert rules(use("write", 3), use("write", 3), *through, use("read", COMPUTE)) == []
    assert rules(use("write", 3), use("read", COMPUTE), *through) == ["unordered"]


def test_an_event_that_is_recorded_again_stands_for_the_later_moment() -> None:
    again = (on("record", LANE), use("write", LANE), on("record", LANE), on("wait", COMPUTE))
    assert rules(*again, use("read", COMPUTE)) == []


def test_what_the_host_has_waited_for_is_past_for_every_stream() -> None:
    for kind, subject in (("host waits for stream", 0), ("host waits for event", 5), ("host waits for device", 0)):
        log = (use("write", LANE), on("record", LANE), on(kind, LANE, subject), use("read", COMPUTE))
        assert rules(*log) == []
    assert rules(use("write", LANE), on("record", LANE), on("host sees event", 0), use("read", COMPUTE)) == []


def test_memory_may_be_had_again_when_its_last_reader_is_past() -> None:
    lent = (on("allocate", COMPUTE, 1), use("write", COMPUTE), on("record", COMPUTE, 4), on("wait", LANE, 4))
    freed, again = on("free", COMPUTE, 1), on("allocate", COMPUTE, 2)
    assert rules(*lent, use("read", LANE), freed) == []
    assert rules(*lent, use("read", LANE), freed, on("allocate", LANE, 2)) == []
    assert rules(*lent, use("read", LANE), freed, again) == ["reused"]
    assert rules(*lent, use("read", LANE), *ORDER, freed, again) == []
    assert rules(*lent, use("read", LANE), freed, *ORDER, again) == []
    assert rules(*lent, use("read", LANE), on("keep for stream", LANE, 1), freed, again) == []
    assert rules(*lent, use("read", LANE), on("keep for stream", 3, 1), freed, again) == ["reused"]


def test_backward_waits_for_the_slow_link_where_it_is_counted_and_nowhere_else() -> None:
    crossing = (use("write", SLOW), on("record", SLOW))
    wait = on("wait", COMPUTE)
    assert rules(mark(BACKWARD), *crossing, wait) == ["slow link"]
    assert rules(mark(BACKWARD), *crossing, on("host waits for event", 0)) == ["slow link"]
    assert rules(mark(BACKWARD), *crossing, on("host sees event", 0)) == []
    assert rules(mark(BACKWARD), *crossing, mark(WINDOW), wait, mark(RESUME)) == []
    assert rules(mark(BACKWARD), *crossing, mark(WINDOW), mark(RESUME), wait) == ["slow link"]
    assert rules(mark(BACKWARD), *crossing, mark(END_OF_BACKWARD), wait) == []
    assert rules(*crossing, wait, mark(BACKWARD), wait) == []
    through_the_lane = (on("wait", LANE), on("record", LANE, 6), on("wait", COMPUTE, 6))
    assert rules(mark(BACKWARD), *crossing, *through_the_lane) == ["slow link"]
