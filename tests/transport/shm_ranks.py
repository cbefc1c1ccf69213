"""What rank functions of the tests of shared memory have in common."""

from __future__ import annotations

import os

import torch.distributed as dist

from hp_plugin.core.transport.shm import GradientRing, Segment, Signals
from hp_plugin.core.transport.shm.signals import signal_bytes

ROWS = 4
COUNTERS = 0
"""Row of the tests' own counters; the rings have the two that follow."""
READY, DONE = 1, 2
RING_AT = 4096


def make_segment(nbytes: int = RING_AT, *, group: dist.ProcessGroup | None = None) -> Segment:
    group = group or dist.group.WORLD
    assert group is not None
    share = nbytes // group.size()
    return Segment(group, nbytes, owned=[(group.rank() * share, (group.rank() + 1) * share)])


def make_signals(segment: Segment, *, timeout_s: float = 30.0) -> Signals:
    assert signal_bytes(ROWS, segment.size) <= RING_AT
    return Signals(segment, 0, timeout_s=timeout_s)


def make_ring(capacity: int, *, timeout_s: float = 30.0) -> GradientRing:
    segment = make_segment(RING_AT + dist.get_world_size() * capacity)
    signals = make_signals(segment, timeout_s=timeout_s)
    return GradientRing(
        segment, RING_AT, capacity=capacity, signals=signals, rows=(READY, DONE), name_of=lambda index: f"unit{index}"
    )


class Turn:
    """A store through which ranks of a test take turns, beside what is tested."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def say(self, word: str) -> None:
        self._store.set(f"turn/{word}", "1")

    def wait_for(self, word: str) -> None:
        self._store.wait([f"turn/{word}"])
