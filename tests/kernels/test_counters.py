"""Counters and barrier in memory that several processes map."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hp_plugin.core.kernels import native
from tests.kernels.peers import Segment, line_of, open_segment, result_of

SECOND = 1_000_000
"""In microseconds, as the timeouts are."""


@pytest.fixture
def segment(native_library: native.NativeLibrary) -> Iterator[Segment]:
    with open_segment(native_library) as opened:
        yield opened


@pytest.mark.parametrize("spin", [0, 1000])
def test_what_a_process_wrote_before_it_published_is_seen_by_who_waited(segment: Segment, spin: int) -> None:
    # 500 values each way: the data of round k is read only between the two publications of that round.
    peer = segment.start(f"""
for k in range(1, 501):
    data[0] = k
    publish(0, k)
    while library.hp_counters_wait(ctypes.c_void_p(base + STRIDE), 1, 0, k, ctypes.c_int64(30_000_000), {spin}) != -1:
        sys.exit(3)
    assert data[1] == 1000 + k
""")
    for k in range(1, 501):
        assert segment.wait(1, k, 30 * SECOND, spin) == -1
        assert segment.data[0] == k
        segment.data[1] = 1000 + k
        segment.publish(1, k)
    assert result_of(peer) == ""


def test_a_timeout_names_the_first_counter_that_is_behind(segment: Segment) -> None:
    for index, value in enumerate((5, 4, 6, 2)):
        segment.publish(index, value)
    began = time.monotonic()
    assert segment.wait(4, 5, 50_000) == 1
    assert 0.05 <= time.monotonic() - began < 5
    segment.publish(1, 7)
    assert segment.wait(4, 5, 1000, spin=100) == 3
    assert segment.wait(3, 5, 0) == -1
    assert segment.wait(0, 5, 0) == -1


def test_no_time_at_all_is_one_look(segment: Segment) -> None:
    assert segment.wait(1, 1, 0) == 0
    segment.publish(0, 1)
    assert segment.wait(1, 1, 0) == -1


@pytest.mark.parametrize("timeout_us", [-1, 2**63 - 1, 2**62])
def test_a_wait_without_a_limit_or_with_a_huge_one_is_no_short_wait(segment: Segment, timeout_us: int) -> None:
    waiter = segment.start(f"say('waits'); say(wait(1, 1, {timeout_us}))")
    assert line_of(waiter) == ["waits"]
    time.sleep(0.2)
    assert waiter.poll() is None
    segment.publish(0, 1)
    assert result_of(waiter) == "-1"


def test_values_may_wrap_around(segment: Segment) -> None:
    segment.publish(0, 2**32 - 2)
    assert segment.wait(1, 2**32 - 3, 0) == -1
    assert segment.wait(1, 1, 0) == 0  # three steps ahead
    for value in (2**32 - 1, 0):
        segment.publish(0, value)
        assert segment.wait(1, 1, 0) == 0
    segment.publish(0, 1)
    assert segment.wait(1, 1, 0) == -1
    assert segment.wait(1, 2**32 - 2, 0) == -1  # long reached


def test_a_waiter_sleeps_and_is_woken(segment: Segment) -> None:
    waiter = segment.start("""
before = resource.getrusage(resource.RUSAGE_SELF)
say("waits")
result = wait(2, 9, 60_000_000)
woken = time.monotonic()
after = resource.getrusage(resource.RUSAGE_SELF)
used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
say(result, woken, used, after.ru_nvcsw - before.ru_nvcsw)
""")
    assert line_of(waiter) == ["waits"]
    time.sleep(0.5)
    segment.publish(0, 9)
    time.sleep(0.3)
    published = time.monotonic()
    segment.publish(1, 9)
    result, woken, used, switches = line_of(waiter)
    assert result == "-1"
    assert float(woken) - published < 10  # and not at the end of its minute
    assert float(used) < 0.2  # it did not spin
    assert int(switches) < 20  # nor look again and again


def test_every_waiter_is_woken(segment: Segment) -> None:
    waiters = [segment.start("say('waits'); say(wait(1, 1, 60_000_000))") for _ in range(3)]
    assert [line_of(waiter) for waiter in waiters] == [["waits"]] * 3
    time.sleep(0.2)
    segment.publish(0, 1)
    assert [result_of(waiter) for waiter in waiters] == ["-1"] * 3


def test_a_waiter_gives_the_interpreter_to_other_threads(segment: Segment) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(segment.wait(1, 1, 30 * SECOND)))
    thread.start()
    segment.publish(0, 1)  # could not run if the wait held the interpreter
    thread.join(timeout=30)
    assert results == [-1]


@pytest.mark.parametrize("spin", [0, 200])
def test_no_rank_leaves_a_barrier_before_all_have_entered(segment: Segment, spin: int) -> None:
    # Two rounds for each value: all have written before the first ends, all have read before the second does.
    program = f"""
own = %d
for k in range(1, 1001):
    data[own] = k
    assert barrier(3, own, 2 * k - 1, 60_000_000, {spin}) == -1
    seen = [data[0], data[1], data[2]]
    assert seen == [k] * 3, (k, seen)
    assert barrier(3, own, 2 * k, 60_000_000, {spin}) == -1
say("passed")
"""
    ranks = [segment.start(program % own) for own in range(3)]
    assert [result_of(rank) for rank in ranks] == ["passed"] * 3


def test_a_barrier_names_who_is_missing_and_may_be_entered_again(segment: Segment) -> None:
    assert segment.barrier(3, 0, 1, 1000) == 1
    segment.publish(1, 1)
    assert segment.barrier(3, 0, 1, 1000) == 2
    late = segment.start("say(barrier(3, 2, 1, 30_000_000))")
    assert segment.barrier(3, 0, 1, 30 * SECOND) == -1
    assert result_of(late) == "-1"


def test_rounds_of_a_barrier_may_wrap_around(segment: Segment) -> None:
    first = 2**32 - 5
    for index in range(2):
        segment.publish(index, first - 1)
    peer = segment.start(f"say([barrier(2, 1, ({first} + k) % 2**32, 30_000_000) for k in range(10)])")
    assert [segment.barrier(2, 0, (first + k) % 2**32, 30 * SECOND) for k in range(10)] == [-1] * 10
    assert result_of(peer) == str([-1] * 10)
