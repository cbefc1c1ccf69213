"""Reducing gradients over both tiers without making backward wait for the slow one.

Unit i's reduce-scatter is issued when its gradients are complete. The inter-supernode reduction of the unit before it
in backward order follows behind, since its own reduce-scatter has had one unit's backward to finish. Nothing waits for
an inter-supernode reduction before the end of backward. The order of every collective follows from the order of the
units alone, so all ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.transport import C10dTransport, Pending
from hp_plugin.core.transport.c10d import all_reduce_sum


@dataclass
class Reduction:
    """One unit's gradients of one backward on their way to `.grad`.

    Attributes:
        gradients: Storage of the unit.
        operands: Inputs of the reduce-scatter, one per parameter of `gradients`.
        transport: Collectives of the shard group; None where the group has one rank.
        replicate_group: Ranks that hold the same shard; None where there is one replica.
        all_reduce: Whether this backward reduces between supernodes and delivers `.grad`. False: the result stays a
            partial sum of the supernode.
        divide_factor: The sum over all ranks is divided by it.
    """

    gradients: UnitGradients
    operands: list[torch.Tensor]
    transport: C10dTransport | None
    replicate_group: dist.ProcessGroup | None
    all_reduce: bool
    divide_factor: float
    _scattered: torch.Tensor | None = None
    _intra: Pending | None = None
    _inter: Pending | None = None

    def start_intra(self, counters: Counters) -> None:
        """Issues the reduction inside the supernode."""
        self._scattered = self.gradients.target()
        slots = self.gradients.slots(self._scattered)
        if self.transport is None:
            for slot, operand in zip(slots, self.operands):
                slot.copy_(operand)
                counters.copied_bytes += slot.numel() * slot.dtype.itemsize
            self.operands = []
            return
        self._intra = self.transport.reduce_scatter(slots, self.operands)
        counters.reduce_scatters += 1
        counters.reduce_scatter_bytes += sum(o.numel() * o.dtype.itemsize for o in self.operands)

    def start_inter(self, counters: Counters) -> None:
        """Waits for the reduction inside the supernode and issues the one between supernodes."""
        if self._intra is not None:
            self._intra.wait()
            self._intra = None
        self.operands = []
        assert self._scattered is not None
        partial = self.gradients.accumulate(self._scattered)
        self._scattered = None
        if self.all_reduce and self.replicate_group is not None:
            self._inter = all_reduce_sum(partial, self.replicate_group)
            counters.all_reduces += 1
            counters.all_reduce_bytes += partial.numel() * partial.dtype.itemsize

    def discard(self) -> None:
        """Waits for what is in flight and drops the result, the unit's partial sum included."""
        for pending in (self._intra, self._inter):
            if pending is not None:
                pending.wait()
        self.operands = []
        self.gradients.partial = None

    def finish(self) -> None:
        """Waits for the reduction between supernodes and delivers `.grad`."""
        if self._inter is not None:
            self._inter.wait()
            self._inter = None
        if self.all_reduce:
            self.gradients.deliver(1.0 / self.divide_factor)


class ReductionPipeline:
    """All reductions of one root module in flight on this rank, in the order in which they were submitted.

    Args:
        counters: Where collectives are counted.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._scattering: Reduction | None = None
        self._reducing: list[Reduction] = []

    def submit(self, gradients: UnitGradients, make: Callable[[], Reduction]) -> None:
        """Starts a reduction and lets the one before it go on to the slow link.

        Args:
            gradients: Storage of the unit.
            make: Makes the reduction. Called after an earlier reduction of the same unit, if any, has delivered.
        """
        if any(r.gradients is gradients for r in self._in_flight()):
            self.flush()
        reduction = make()
        previous, self._scattering = self._scattering, reduction
        if previous is not None:
            # First what the slow link can start with, then the new reduce-scatter: on a backend whose launches queue
            # (one stream), the other order would put the slow link behind a reduction that has only begun.
            previous.start_inter(self._counters)
            self._reducing.append(previous)
        reduction.start_intra(self._counters)

    def flush(self) -> None:
        """Waits for everything in flight; every `.grad` is then final."""
        if self._scattering is not None:
            self._scattering.start_inter(self._counters)
            self._reducing.append(self._scattering)
            self._scattering = None
        reducing, self._reducing = self._reducing, []
        for reduction in reducing:
            reduction.finish()

    def discard(self) -> None:
        """Drops everything in flight: the backward that submitted it has failed, alike on every rank."""
        for reduction in self._in_flight():
            reduction.discard()
        self._scattering = None
        self._reducing = []

    def _in_flight(self) -> list[Reduction]:
        return self._reducing if self._scattering is None else [*self._reducing, self._scattering]
