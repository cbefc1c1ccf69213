"""Rank functions of the tests of counters."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from hp_plugin.core.transport.shm import PeerError
from tests.faults.watched import End, end_process, watch
from tests.support import init_gloo
from tests.support.told import told
from tests.transport.shm_ranks import COUNTERS, READY, Turn, make_segment, make_signals


def wait_for_the_one_behind() -> dict[str, Any]:
    """Ranks 1 and 3 of four share memory; 3 does not publish."""
    init_gloo()
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        dist.barrier()
        return {}
    assert isinstance(group, dist.ProcessGroup)
    signals = make_signals(make_segment(group=group), timeout_s=0.5)
    found: dict[str, Any] = {}
    if dist.get_rank() == 1:
        signals.publish(COUNTERS, 5)
        began = time.monotonic()
        found["told"] = told(lambda: signals.wait(COUNTERS, 5, lambda: "do its part of unit u in forward"))
        found["after"] = time.monotonic() - began
        found["own"] = told(lambda: signals.wait(COUNTERS, 3, lambda: "x")) if signals.has_reached(COUNTERS, 0) else ""
    dist.barrier()
    if dist.get_rank() == 3:
        found["own alone"] = told(lambda: signals.wait(COUNTERS, 4, lambda: "do something"))
    dist.barrier(group)
    return found


def wait_for_one_that_ends(*, directory: str, ranks: int, does_its_part: bool) -> tuple[End, float]:
    """The last rank ends. The others wait for all, of which rank 1 lives and is behind as well."""

    def work() -> float:
        init_gloo()
        segment = make_segment()
        signals, rank = make_signals(segment), dist.get_rank()
        turn = Turn()
        if rank == ranks - 1:
            if does_its_part:
                signals.publish(COUNTERS, 1)
            Path(directory, "ended at").write_text(repr(time.monotonic()))
            end_process("kill")
        if does_its_part:
            while segment.is_alive(ranks - 1):
                time.sleep(0.01)
            time.sleep(0.4 if rank == 1 else 0.0)  # the others look who lives meanwhile
        if does_its_part or rank != 1:
            signals.publish(COUNTERS, 1)
        signals.wait(COUNTERS, 1, lambda: "do its part of unit u in forward")
        turn.say(f"through {rank}")
        return 0.0

    end = watch(work, directory=directory, ranks=ranks)
    return end, float(Path(directory, "ended at").read_text())


def end_between_two_looks() -> dict[str, str]:
    """Rank 1 does its part and ends just after rank 0 has seen that it is behind."""
    init_gloo()
    segment = make_segment()
    signals, turn = make_signals(segment), Turn()
    if dist.get_rank() == 1:
        turn.wait_for("seen behind")
        signals.publish(COUNTERS, 1)
        turn.say("did its part")
        return {}

    def is_alive(rank: int) -> bool:
        turn.say("seen behind")
        turn.wait_for("did its part")
        return False

    signals.publish(COUNTERS, 1)
    with mock.patch.object(segment, "is_alive", is_alive):
        return {"told": told(lambda: signals.wait(COUNTERS, 1, lambda: "do its part"))}


def wrap_around() -> list[int]:
    """Counters pass 2 ** 32 in step on two ranks."""
    init_gloo()
    signals = make_signals(make_segment())
    start = (1 << 32) - 20
    for row in (COUNTERS, READY):
        signals.publish(row, start)
    dist.barrier()
    passed = []
    for value in range(start + 1, start + 41):
        signals.publish(COUNTERS, value)
        signals.wait(COUNTERS, value, lambda: "count")
        assert not signals.has_reached(COUNTERS, value + 2), "a peer is at most one ahead"
        passed.append(value)
        signals.publish(READY, value)
        signals.wait(READY, value, lambda: "count")
    return passed


class _InterruptError(Exception):
    pass


def interrupt_a_wait(*, number: int) -> dict[str, Any]:
    """A signal arrives during a wait that would last for half a minute."""
    init_gloo()
    signals = make_signals(make_segment())
    if dist.get_rank() == 1:
        dist.barrier()
        return {}

    def handle(*_: Any) -> None:
        raise _InterruptError

    before = signal.signal(number, handle) if number != signal.SIGINT else None
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
    began = time.monotonic()
    try:
        signals.wait(COUNTERS, 1, lambda: "do nothing")
        name = "returned"
    except (_InterruptError, KeyboardInterrupt) as error:
        name = type(error).__name__
    found = {"raised": name, "after": time.monotonic() - began}
    if before is not None:
        signal.signal(number, before)
    dist.barrier()
    return found


def fail_on_the_lane() -> dict[str, str]:
    """What this rank's own thread failed with is what a wait for its counters says."""
    init_gloo()
    signals = make_signals(make_segment())
    dist.barrier()
    found = {}
    for name, failure in (("peer", PeerError("rank 9 has ended")), ("other", ArithmeticError("a sum"))):
        signals.failure = failure
        found[name] = told(lambda: signals.wait(COUNTERS, 1, lambda: "do nothing"))
    dist.barrier()
    return found
