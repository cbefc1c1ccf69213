"""Reducing gradients over both tiers without making backward wait for either.

When the gradients of unit i are complete, the thread that computes issues its reduce-scatter and goes on. What follows
is queued on the lane of the unit's group: wait for the reduce-scatter, add to an earlier partial sum, and, when the
last unit of a bucket is there, issue the reduction of the bucket between supernodes. So the slow link starts as soon as
its operand exists, while backward works on the units before. Nothing waits for the slow link but the end of backward
and, where sums need buffers beside `.grad`, the window of those buffers.

The order of collectives in every group follows from the order in which units are submitted, so all ranks agree on it.
`docs/schedule.md` shows it as a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.bucket import Bucket, Member
from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.fsdp.owner_reduction import OwnerReduction
from hp_plugin.core.fsdp.schedule import Schedule
from hp_plugin.core.kernels import accumulate_scaled_, scale_copy_
from hp_plugin.core.transport import C10dTransport, Pending, all_reduce_sum
from hp_plugin.core.transport.lane import Ticket
from hp_plugin.core.transport.pending import PendingCopies

DEFAULT_WINDOW = 2
"""One bucket fills while the one before crosses: fewer leaves the slow link idle, more does not make it faster."""


@dataclass
class Reduction:
    """One unit's gradients of one backward, to be reduced.

    Attributes:
        operands: Inputs of the reduce-scatter, one per operand of the unit, 1-D; none where they are yet to be written.
        dtype: Of the operands.
        num_bytes: Of all operands.
        transport: Collectives of the shard group; None where it has one rank.
        all_reduce: Whether the sum crosses between supernodes and becomes `.grad`. False: it stays a partial sum.
        divide_factor: The sum over all ranks is divided by it.
        start: Instead of a collective: writes the operands and starts their reduction into the tensors given, 1-D. Runs
            on the lane.
    """

    operands: list[torch.Tensor]
    dtype: torch.dtype
    num_bytes: int
    transport: C10dTransport | None
    all_reduce: bool
    divide_factor: float
    start: Callable[[list[torch.Tensor]], Pending] | None = None


@dataclass
class Crossing:
    """A bucket on its way between supernodes.

    Attributes:
        bucket: The bucket.
        members: The units whose sums cross, with the factor of their delivery.
        tickets: Jobs of the lane that must have run.
        messages: What crosses; filled by the last of those jobs.
        to_owners: What crosses where some of it is wanted by one replica alone; likewise.
    """

    bucket: Bucket
    members: dict[UnitGradients, float]
    tickets: list[Ticket]
    messages: list[tuple[Pending, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    to_owners: list[OwnerReduction] = field(default_factory=list)

    def finish(self) -> None:
        """Waits for the reduction between supernodes and delivers every `.grad`."""
        for ticket in self.tickets:
            ticket.wait()
        for pending, message, wire in self.messages:
            pending.wait()
            if wire is not message:
                message.copy_(wire)
        for reduction in self.to_owners:
            reduction.wait()
        for unit, scale in self.members.items():
            unit.is_in_flight = False
            unit.deliver(scale)
        self.bucket.release_side()


class ReductionPipeline:
    """All reductions of one root module in flight on this rank.

    Args:
        counters: Where collectives and waits are counted.
        window: How many buffers beside `.grad` may exist while their sums cross between supernodes.
    """

    def __init__(self, counters: Counters, window: int) -> None:
        self.counters = counters
        self.window = window
        self.buckets: list[Bucket] = []
        self.schedule: Schedule | None = None
        self._bucket_of: dict[UnitGradients, Bucket] = {}
        self._crossing: list[Crossing] = []
        self._intra: Ticket | None = None

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Sets the buckets. Nothing may be in flight."""
        self.buckets = list(buckets)
        self._bucket_of = {unit: bucket for bucket in buckets for unit in bucket.units}

    # ---- during backward --------------------------------------------------------------------------------------------

    def submit(self, unit: UnitGradients, make: Callable[[], Reduction]) -> None:
        """Starts the reduction of a unit; does not wait for it.

        Args:
            unit: A unit of one of the buckets.
            make: Makes the reduction. Called after an earlier reduction of the same unit, if any, has delivered.
        """
        bucket = self._bucket_of[unit]
        if unit.is_in_flight:
            with self.counters.waiting(WaitCause.WINDOW):
                self._finish_until(lambda: not unit.is_in_flight)
        self._settle_intra()
        reduction = make()
        self._start_intra(bucket, unit, reduction)
        bucket.round[unit] = Member(all_reduce=reduction.all_reduce, scale=1.0 / reduction.divide_factor)
        if bucket.is_complete:
            self._launch(bucket)

    def _start_intra(self, bucket: Bucket, unit: UnitGradients, reduction: Reduction) -> None:
        """Issues the reduction inside the supernode and queues what completes the partial sum."""
        operands = reduction.operands
        adds = unit.partial is not None
        total = unit.partial if unit.partial is not None else bucket.begin_sum(unit, before_side=self._make_room)
        scattered = total
        if adds or reduction.dtype != total.dtype:
            scattered = torch.empty_like(total, dtype=reduction.dtype)
        slots = unit.slots(scattered)
        started: list[Pending] = []
        start: Ticket | None = None
        if reduction.transport is None:
            started.append(PendingCopies(slots, operands))
            self.counters.copied_bytes += reduction.num_bytes
        else:
            begin = reduction.start
            if begin is None:
                started.append(reduction.transport.reduce_scatter(slots, operands))
            else:
                start = bucket.lane.submit(lambda: started.append(begin(slots)))
            self.counters.reduce_scatters += 1
            self.counters.reduce_scatter_bytes += reduction.num_bytes
            self._note("intra", "reduce-scatter", [unit])

        if scattered is not total and not adds:
            self.counters.copied_bytes += total.numel() * total.dtype.itemsize
        # The collective alone keeps the operands from here on, so that each goes when it is summed. What was allocated
        # here and is read on the lane must not be handed out again before.
        bucket.lane.protect([*operands, *started[0].temporaries] if started else operands)
        if scattered is not total:
            bucket.lane.protect([scattered])
        operands.clear()

        def complete() -> None:
            if start is not None:
                start.wait()  # has run; raises where it failed
            started.pop().wait()
            if adds:
                accumulate_scaled_(total, scattered, 1.0)
            elif scattered is not total:
                scale_copy_(total, scattered, 1.0)

        ticket = bucket.lane.submit(complete)
        bucket.tickets.append(ticket)
        self._intra = ticket

    def _settle_intra(self) -> None:
        """Waits for the reduction inside the supernode of the unit before, which has had a backward's time.

        It bounds the unsharded gradients that exist at once: those of the unit that runs and of the one before.
        """
        ticket, self._intra = self._intra, None
        if ticket is not None and not ticket.is_done:
            with self.counters.waiting(WaitCause.REDUCE_SCATTER):
                ticket.wait()

    def _launch(self, bucket: Bucket) -> None:
        """Sends what has been submitted of a bucket across, behind the jobs that complete it."""
        members = {unit: member.scale for unit, member in bucket.round.items() if member.all_reduce}
        bucket.round = {}
        if not members:
            bucket.forget_done_jobs()
            return
        crossing = Crossing(bucket, members, bucket.tickets)
        bucket.tickets = []
        for unit in members:
            unit.is_in_flight = True
        self._crossing.append(crossing)
        route = bucket.route
        if route.group is None:
            return
        if bucket.has_owners:
            self._launch_to_owners(crossing)
            return
        messages = bucket.messages(list(members))
        for message in messages:
            self.counters.all_reduces += 1
            self.counters.all_reduce_bytes += message.numel() * route.wire_dtype.itemsize
            if route.wire_dtype != route.dtype:
                self.counters.copied_bytes += message.numel() * (route.wire_dtype.itemsize + route.dtype.itemsize)
        self._note("inter", "all-reduce", list(members))
        earlier = tuple(crossing.tickets)
        crossing.tickets.append(bucket.lane.submit(lambda: self._cross(crossing, messages, earlier)))

    def _launch_to_owners(self, crossing: Crossing) -> None:
        """Sends a bucket across of which one replica alone wants a part: one exchange, whichever buffers it lies in."""
        route, units = crossing.bucket.route, [u for u in crossing.bucket.units if u in crossing.members]
        group = route.group
        assert group is not None
        segments = [segment for unit in units for segment in unit.segments]
        mine = dist.get_rank(group)
        shared = sum(each.length for each in segments if each.owner is None)
        owned = sum(each.length for each in segments if each.owner is not None)
        kept = shared + sum(each.length for each in segments if each.owner == mine)
        self.counters.all_reduces += shared > 0
        self.counters.all_reduce_bytes += shared * route.wire_dtype.itemsize
        self.counters.owner_reductions += 1
        self.counters.owner_reduction_bytes += owned * route.wire_dtype.itemsize
        # Everything is packed; what this rank wants is unpacked.
        self.counters.copied_bytes += (shared + owned) * route.wire_dtype.itemsize + kept * route.dtype.itemsize
        self._note("inter", "reduce to owners", units)
        earlier = tuple(crossing.tickets)

        def cross() -> None:
            for ticket in earlier:
                ticket.wait()  # as in `_cross`
            sums = [unit.partial for unit in units if unit.partial is not None]
            assert len(sums) == len(units)
            crossing.to_owners.append(OwnerReduction(sums, [u.segments for u in units], group, route.wire_dtype))

        crossing.tickets.append(crossing.bucket.lane.submit(cross))

    def _cross(self, crossing: Crossing, messages: list[torch.Tensor], earlier: Sequence[Ticket]) -> None:
        """Runs on the lane: issues the reduction between supernodes. Its result is waited for elsewhere."""
        for ticket in earlier:
            ticket.wait()  # has run; raises where it failed: half a sum must not reach the other supernodes
        route = crossing.bucket.route
        assert route.group is not None
        for message in messages:
            wire = message.to(route.wire_dtype)
            crossing.messages.append((all_reduce_sum(wire, route.group), message, wire))

    @property
    def intra_in_flight(self) -> Ticket | None:
        """The reduction inside the supernode that was started last, unless it has been waited for."""
        return self._intra

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Makes sure that one more side buffer fits into the window."""
        if self._sides_crossing() >= self.window:
            with self.counters.waiting(WaitCause.WINDOW):
                self._finish_until(lambda: self._sides_crossing() < self.window)

    def _sides_crossing(self) -> int:
        return sum(crossing.bucket.has_side for crossing in self._crossing)

    def _finish_until(self, is_enough: Callable[[], bool]) -> None:
        while self._crossing and not is_enough():
            self._crossing.pop(0).finish()

    def end_round(self) -> None:
        """End of a backward: sends what has been submitted of buckets of which some unit took no part."""
        for bucket in self.buckets:
            if bucket.round:
                self._launch(bucket)

    def flush(self) -> None:
        """Waits for everything that crosses; every `.grad` is then final."""
        if self._crossing:
            with self.counters.waiting(WaitCause.END_OF_BACKWARD):
                self._finish_until(lambda: False)

    def discard(self) -> None:
        """Drops everything in flight: the backward that submitted it has failed, alike on every rank."""
        self._intra = None
        for bucket in self.buckets:
            _outlive(bucket.tickets, ())
        for crossing in self._crossing:
            _outlive(crossing.tickets, [*(pending for pending, _, _ in crossing.messages), *crossing.to_owners])
        self._crossing = []
        for bucket in self.buckets:
            bucket.abandon()

    def _note(self, stream: str, event: str, units: Sequence[UnitGradients]) -> None:
        if self.schedule is not None:
            self.schedule.note(stream, event, [unit.name for unit in units])


def _outlive(tickets: Sequence[Ticket], messages: Sequence[Pending]) -> None:
    """Waits for all of it, whether it fails or not: the memory it works in is about to be given up."""
    for ticket in tickets:
        with contextlib.suppress(Exception):
            ticket.wait()
    for pending in messages:
        with contextlib.suppress(Exception):
            pending.wait()
