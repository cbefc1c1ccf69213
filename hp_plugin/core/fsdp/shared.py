"""Parameters and gradients of units in memory that the ranks of a supernode share. See docs/shared-memory.md.

Full parameters lie in a segment, one copy for all ranks (`shared_fulls.py`). Gradients go through a ring
(`hp_plugin.core.transport.shm.ring`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.core.fsdp.parameter import MeshInfo
from hp_plugin.core.fsdp.shared_fulls import AliasedFulls, SharedFulls
from hp_plugin.core.transport.shm import GradientRing, Segment, SharedMemoryError, Signals, agree
from hp_plugin.core.transport.shm.memory import mebibytes
from hp_plugin.core.transport.shm.ring import entry_bytes
from hp_plugin.core.transport.shm.signals import signal_bytes

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root
    from hp_plugin.core.fsdp.unit import Unit

_log = logging.getLogger(__name__)
_ALIGNMENT = 64
"""Bytes. Full tensors start at cache lines."""
_ENTRIES_AHEAD = 3
"""Gradients of so many ordinary units fit into a ring: one that peers read, one that is written, one for skew."""


@dataclass(frozen=True)
class SharedPlan:
    """Where everything lies in a segment. Plain arithmetic, alike on all ranks.

    Attributes:
        full_offsets: First byte of the full tensor of each parameter, by unit.
        ring_offset: First byte of the rings.
        ring_bytes: Bytes of one rank's ring.
        ranks: Size of the shard group.
        num_bytes: Of the segment.
    """

    full_offsets: tuple[tuple[int, ...], ...]
    ring_offset: int
    ring_bytes: int
    ranks: int
    num_bytes: int

    @classmethod
    def of(cls, units: Sequence[Unit], ranks: int, *, inner: Sequence[Unit]) -> SharedPlan:
        """The plan for `units`, of which `inner` are those that are not the root."""
        end = signal_bytes(2 * len(units) + 2, ranks)
        offsets = []
        for unit in units:
            of_unit = []
            for parameter in unit.parameters:
                of_unit.append(end)
                end = _aligned(end + parameter.slot.numel * parameter.compute_dtype.itemsize)
            offsets.append(tuple(of_unit))
        largest = max(_entry_bytes(unit) for unit in units)
        ring = max(largest, _ENTRIES_AHEAD * max((_entry_bytes(unit) for unit in inner), default=0))
        return cls(tuple(offsets), end, ring, ranks, end + ranks * ring)

    def owned_by(self, rank: int, units: Sequence[Unit]) -> list[tuple[int, int]]:
        """(start, end) in bytes of what `rank` writes, or writes first."""
        ring = self.ring_offset + rank * self.ring_bytes
        owned = [(ring, ring + self.ring_bytes)]
        if rank == 0:
            owned.append((0, self.full_offsets[0][0] if self.full_offsets[0] else self.ring_offset))
        for unit, offsets in zip(units, self.full_offsets):
            for parameter, start in zip(unit.parameters, offsets):
                slot, size = parameter.slot, parameter.compute_dtype.itemsize
                low, high = slot.numel * rank // self.ranks, slot.numel * (rank + 1) // self.ranks
                if slot.is_row_major:
                    row = slot.numel // slot.shape[slot.dim]
                    low, high = slot.offset(rank) * row, slot.offset(rank + 1) * row
                owned.append((start + low * size, start + high * size))
        return owned

    def describe(self) -> str:
        """Sizes for people."""
        fulls = self.ring_offset
        return (
            f"{mebibytes(self.num_bytes)} of shared memory for {self.ranks} ranks: {mebibytes(fulls)} of full "
            f"parameters, {mebibytes(self.ranks * self.ring_bytes)} of gradients ({mebibytes(self.ring_bytes)} a rank)"
        )


class SharedMemory:
    """What the units of one root on one mesh share with the ranks of the shard group.

    Args:
        info: The mesh.
        units: The units, in the order of the root. Every rank of the shard group must make this object, with the same.
        root: Their root.

    Raises:
        SharedMemoryError: The segment cannot be had, or the ranks have different units; alike on all ranks.
    """

    def __init__(self, info: MeshInfo, units: Sequence[Unit], root: Root) -> None:
        group = info.shard_group
        _check_alike(group, units)
        plan = SharedPlan.of(units, info.shard_size, inner=[unit for unit in units if unit is not root.unit])
        if info.shard_rank == 0:
            _log.info("rank %d: %s", dist.get_rank(), plan.describe())
        try:
            segment = Segment(group, plan.num_bytes, owned=plan.owned_by(info.shard_rank, units))
        except SharedMemoryError as error:
            raise SharedMemoryError(f"{error}. {plan.describe()}. {_ADVICE}") from error
        self.plan = plan
        signals = Signals(segment, 0, timeout_s=timeout_of(group))
        self.ring = GradientRing(
            segment,
            plan.ring_offset,
            capacity=plan.ring_bytes,
            signals=signals,
            rows=(2 * len(units), 2 * len(units) + 1),
            name_of=lambda index: units[index].name,
        )
        self._collected: dict[WaitCause, tuple[int, float]] = {}
        self.fulls: list[SharedFulls] = [
            (AliasedFulls if unit.residence == "aliased" else SharedFulls)(unit, index, segment, signals, offsets)
            for index, (unit, offsets) in enumerate(zip(units, plan.full_offsets))
        ]

    def collect_waits(self, counters: Counters) -> None:
        """Adds the waits of lanes since the last call to `counters`."""
        now = {
            WaitCause.RING: (self.ring.room_waits, self.ring.room_wait_seconds),
            WaitCause.PEERS: (
                sum(fulls.reader_waits for fulls in self.fulls),
                sum(fulls.reader_wait_seconds for fulls in self.fulls),
            ),
        }
        for cause, (count, seconds) in now.items():
            wait, (old_count, old_seconds) = counters.waits[cause.value], self._collected.get(cause, (0, 0.0))
            wait.count += count - old_count
            wait.seconds += seconds - old_seconds
        self._collected = now


_ADVICE = 'Use transport="c10d", which shares no memory, or free some'


def _check_alike(group: dist.ProcessGroup, units: Sequence[Unit]) -> None:
    """Raises SharedMemoryError on all ranks of `group` unless all have the same units."""
    own = [(unit.name, _facts_of(unit)) for unit in units]
    everyone = agree(group, own)
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        at, difference = _first_difference(everyone[0], other)
        raise SharedMemoryError(
            f"ranks of one shard group have different units. Unit {at} of rank {dist.get_global_rank(group, 0)} and of "
            f"rank {dist.get_global_rank(group, rank)}: {difference}. Every rank must build and shard the same model"
        )


_Facts = list[tuple[str, str]]


def _facts_of(unit: Unit) -> _Facts:
    """What must be alike on all ranks, in the order in which it is compared: what it is, and how it is."""
    facts = [("residence", unit.residence)]
    for p in unit.parameters:
        facts.append(("parameter", p.name))
        facts.append((f"shape of {p.name}", str(tuple(p.slot.shape))))
        facts.append((f"sharded dim of {p.name}", str(p.slot.dim)))
        facts.append((f"compute dtype of {p.name}", str(p.compute_dtype)))
    facts.append(("number of parameters", str(len(unit.parameters))))
    if unit.parameters:
        facts.append(("reduce dtype", str(unit.reduce_dtype)))
    return facts


def _first_difference(one: list[tuple[str, _Facts]], other: list[tuple[str, _Facts]]) -> tuple[int, str]:
    """The number of the first unit that differs, and how."""
    none: tuple[str, _Facts] = ("", [])
    for at in range(max(len(one), len(other))):
        (name, facts), (other_name, other_facts) = (each[at] if at < len(each) else none for each in (one, other))
        if name != other_name:
            return at, f"{name or 'none'} and {other_name or 'none'}"
        for (what, value), (other_what, other_value) in zip(facts, other_facts):
            if what != other_what:
                return at, f"{name} has {what} and {other_what}"
            if value != other_value:
                return at, f"{what} of {name} is {value} and {other_value}"
    raise AssertionError("they are equal")


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that the CPU backend of `group` lets an operation take."""
    options = group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())


def _entry_bytes(unit: Unit) -> int:
    if not unit.parameters:
        return 0
    return entry_bytes([p.slot.padded_numel * unit.reduce_dtype.itemsize for p in unit.parameters])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
