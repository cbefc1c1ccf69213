"""Rank functions of the tests of rings."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.transport.shm import GradientRing
from hp_plugin.core.transport.shm.ring import entry_bytes
from tests.support import init_gloo
from tests.support.told import told
from tests.transport.shm_ranks import Turn, make_ring

Entry = tuple[int, list[int], torch.dtype]


def _operand(entry: int, index: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * entry + 100 * index + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (entry % 4)).to(dtype)


def _expected(entry: int, index: int, rank: int, ranks: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(length, dtype=wide)
    for other in range(ranks):
        part = _operand(entry, index, other, ranks * length, dtype).view(ranks, length)[rank].to(wide)
        total = part if other == 0 else total + part
    return total


def sums(*, dtypes: Sequence[torch.dtype], entries: int, keeps_own: bool) -> list[str]:
    """Reduces entries of changing sizes in a ring that holds two or three of them; returns what is wrong.

    With `keeps_own` a rank keeps its own slices to itself, and what lies in their place in the ring is no number.
    """
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in dtypes:
        sizes = [[7, 1, 64], [33], [5, 5], [1], [40, 2]]
        largest = max(entry_bytes([ranks * n * dtype.itemsize for n in lengths]) for lengths in sizes)
        ring = make_ring(2 * largest + 192)
        waiting: list[tuple[int, list[torch.Tensor], Any]] = []
        for number in range(entries):
            lengths = sizes[number % len(sizes)]
            entry, must_be_done = ring.place(number % 5, [ranks * n for n in lengths], dtype)
            # The lane of training: sums are formed in the order of entries, as late as space allows.
            while waiting and waiting[0][0] < must_be_done:
                waiting.pop(0)[2].wait()
            ring.wait_until_free(must_be_done, 0)
            own = []
            for index, operand in enumerate(entry.operands):
                operand.copy_(_operand(number, index, rank, operand.numel(), dtype))
                place = operand.view(ranks, -1)[rank]
                own.append(place.clone())
                if keeps_own:
                    place.fill_(float("nan"))
            wide = torch.float32 if dtype == torch.bfloat16 and number % 2 else dtype
            outputs = [torch.full((n,), float("nan"), dtype=wide) for n in lengths]
            pending = ring.reduce_scatter(entry, outputs, own=own if keeps_own else None)
            waiting.append((number, outputs, pending))
            for done, results, pending in list(waiting):
                if number - done >= 1:
                    waiting.remove((done, results, pending))
                    pending.wait()
                    pending.wait()
                    for index, output in enumerate(results):
                        wanted = _expected(done, index, rank, ranks, output.numel(), dtype)
                        if not torch.equal(output, wanted.to(output.dtype)):
                            wrong.append(f"{dtype}: entry {done}, operand {index}")
        dist.barrier()
    return wrong


def own_slices_alive() -> list[int]:
    """How many of two slices given as `own` exist before and after the sum."""
    init_gloo()
    ring = make_ring(4096)
    entry, _ = ring.place(0, [4, 6], torch.float32)
    for operand in entry.operands:
        operand.fill_(1.0)
    own = [torch.ones(2), torch.ones(3)]
    alive = [weakref.ref(one) for one in own]
    pending = ring.reduce_scatter(entry, [torch.empty(2), torch.empty(3)], own=own)
    del own
    counts = [sum(one() is not None for one in alive)]
    pending.wait()
    counts.append(sum(one() is not None for one in alive))
    dist.barrier()
    return counts


def press_back() -> dict[str, Any]:
    """Rank 0 is fast, and the ring holds two entries; rank 1 adds up the first only when told to."""
    init_gloo()
    turn = Turn()
    numel = 32
    ring = make_ring(2 * entry_bytes([numel * 4]))
    found: dict[str, Any] = {}
    first, result = _enter(ring, 0)
    if dist.get_rank() == 1:
        second, _ = _enter(ring, 1)
        turn.wait_for("rank 0 is stuck")
        time.sleep(0.3)
        first.wait()
        turn.say("added up")
        second.wait()
        _enter(ring, 2)[0].wait()
        return found
    first.wait()
    second, _ = _enter(ring, 1)
    second.wait()
    entry, must_be_done = ring.place(2, [numel], torch.float32)
    found["must be done"] = must_be_done
    found["free at first"] = ring.is_free(must_be_done)
    turn.say("rank 0 is stuck")
    began = time.monotonic()
    ring.wait_until_free(must_be_done, 2)
    found["blocked for"] = time.monotonic() - began
    turn.wait_for("added up")
    found["free then"] = ring.is_free(must_be_done)
    entry.operands[0].fill_(3.0)
    ring.reduce_scatter(entry, [result]).wait()
    found["sum"] = result.tolist()
    return found


def _enter(ring: GradientRing, number: int) -> tuple[Any, torch.Tensor]:
    entry, must_be_done = ring.place(number, [32], torch.float32)
    ring.wait_until_free(must_be_done, number)
    entry.operands[0].fill_(float(number + 1))
    output = torch.empty(16)
    return ring.reduce_scatter(entry, [output]), output


def mix_up(*, entries: tuple[list[Entry], list[Entry]]) -> list[str]:
    """Ranks 0 and 1 enter different things; says how each entry went."""
    init_gloo()
    ring = make_ring(4096, timeout_s=1.0)
    found = []
    for unit, lengths, dtype in entries[dist.get_rank()]:
        entry, must_be_done = ring.place(unit, [2 * n for n in lengths], dtype)
        ring.wait_until_free(must_be_done, unit)
        for operand in entry.operands:
            operand.fill_(1.0)
        outputs = [torch.zeros(n, dtype=dtype) for n in lengths]
        found.append(told(ring.reduce_scatter(entry, outputs).wait))
    dist.barrier()
    return found
