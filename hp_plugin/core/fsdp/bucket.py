"""Buckets: the gradients of neighbouring units that cross between supernodes in one message.

A slow link wants few, large messages. What is in a bucket depends on the configuration alone (the units, their sizes
and dtypes, the bucket size), never on what arrives when, so all ranks agree on it without talking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.gradients import UnitGradients, storage_references
from hp_plugin.core.fsdp.slot import aligned_offsets
from hp_plugin.core.transport.lane import Lane, Ticket


@dataclass(frozen=True)
class Route:
    """How sums of a unit travel between supernodes. Units of one bucket share it.

    Attributes:
        group: Ranks that hold the same shard; None where there is one replica.
        dtype: Dtype in which sums are kept.
        wire_dtype: Dtype in which they cross; a cast each way where it is not `dtype`.
    """

    group: dist.ProcessGroup | None
    dtype: torch.dtype
    wire_dtype: torch.dtype


@dataclass
class Member:
    """A unit's part in the current round of its bucket, from its submission to the launch of the bucket.

    Attributes:
        all_reduce: Whether its sum crosses between supernodes and is delivered; else it stays a partial sum.
        scale: Factor of the delivery.
    """

    all_reduce: bool
    scale: float


@dataclass(eq=False)
class Bucket:
    """Units whose sums are adjacent in one buffer and leave together.

    Attributes:
        units: In the order of their slices, which is that of backward.
        route: How their sums travel.
        lane: Where everything that follows a reduce-scatter is queued.
        device: Of the buffers.
        round: What has been submitted since the last launch, in order of submission.
        tickets: Jobs of the lane that complete the sums submitted.
    """

    units: Sequence[UnitGradients]
    route: Route
    lane: Lane
    device: torch.device
    round: dict[UnitGradients, Member] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    _flat: torch.Tensor | None = None
    _side: torch.Tensor | None = None
    _flat_messages: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _own_references: int = 0

    def __post_init__(self) -> None:
        offsets, self.numel = aligned_offsets([u.numel for u in self.units], 1)
        self._offsets = dict(zip(self.units, offsets))
        self._gaps = [(at + start, length) for unit, at in self._offsets.items() for start, length in unit.gaps]

    @property
    def num_bytes(self) -> int:
        """Bytes of a buffer."""
        return self.numel * self.route.dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Whether every unit has been submitted since the last launch."""
        return len(self.round) == len(self.units)

    @property
    def has_owners(self) -> bool:
        """Whether one replica alone wants the gradient of some parameter."""
        return any(unit.has_owners for unit in self.units)

    @property
    def has_side(self) -> bool:
        """Whether it holds a buffer beside `.grad`."""
        return self._side is not None

    def forget_done_jobs(self) -> None:
        """Drops the tickets of jobs that have run. Raises what one of them raised."""
        for ticket in self.tickets:
            if ticket.is_done:
                ticket.wait()
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_done]

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def begin_sum(self, unit: UnitGradients, *, before_side: Callable[[], None]) -> torch.Tensor:
        """Starts the partial sum of `unit`: chooses its place and returns it, 1-D, to be overwritten.

        Args:
            unit: One of `units`, without a partial sum.
            before_side: Called before a side buffer is allocated.
        """
        if unit.flat_is_free:
            if self._flat_is_unused and self._flat_is_kept_elsewhere:
                self._leave_flat()
            unit.partial = self._flat_slice(unit)
        else:
            if self._side is None:
                before_side()
                self._side = self._new_buffer()
            if unit.reduces_in_grad:
                self._flat_slice(unit)
            unit.partial = self._slice(self._side, unit)
        return unit.partial

    def _flat_slice(self, unit: UnitGradients) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._new_buffer()
            for each in self.units:
                if each.reduces_in_grad:
                    each.use_flat(self._slice(self._flat, each))
            self._own_references = storage_references(self._flat)
        elif self._flat.untyped_storage().size() == 0:
            self._flat.untyped_storage().resize_(self.num_bytes)
            self._clear_gaps(self._flat)
        return unit.flat

    def release_flat(self) -> None:
        """Gives back the memory of the flat buffer while no gradient and no sum exists, thus during forward.

        Views and addresses stay, so the same `.grad` objects serve the next step. Whoever kept a gradient, or a view of
        one, past the end of its step keeps it: the memory stays, and the next sum gets a new buffer.
        """
        if self._flat_is_unused and not self._flat_is_kept_elsewhere:
            assert self._flat is not None
            self._flat.untyped_storage().resize_(0)

    def _leave_flat(self) -> None:
        """Leaves the flat buffer to whoever holds a view of it."""
        self._flat, self._flat_messages = None, {}
        for unit in self.units:
            unit.forget_flat()

    @property
    def _flat_is_unused(self) -> bool:
        """Whether the flat buffer has memory, holds neither sum nor gradient, and no sum beside it is to go into it."""
        if self._flat is None or self._flat.untyped_storage().size() == 0:
            return False
        return all(unit.partial is None and (unit.flat_is_free or not unit.reduces_in_grad) for unit in self.units)

    @property
    def _flat_is_kept_elsewhere(self) -> bool:
        """Whether anyone but this bucket and its units holds a view of the flat buffer."""
        assert self._flat is not None
        expected = self._own_references + sum(unit.flat_references for unit in self.units)
        return storage_references(self._flat) != expected or any(unit.wrappers_are_shared for unit in self.units)

    def release_side(self) -> None:
        """Drops the side buffer once no partial sum lies in it."""
        if all(unit.partial is None or unit.sums_in_flat for unit in self.units):
            self._side = None

    def _new_buffer(self) -> torch.Tensor:
        buffer = torch.empty(self.numel, dtype=self.route.dtype, device=self.device)
        self._clear_gaps(buffer)
        return buffer

    def _clear_gaps(self, buffer: torch.Tensor) -> None:
        # The gaps between slots cross with the rest and must not grow into inf or nan. Slots are always written whole.
        for start, length in self._gaps:
            buffer.narrow(0, start, length).zero_()

    def _slice(self, buffer: torch.Tensor, unit: UnitGradients) -> torch.Tensor:
        return buffer.narrow(0, self._offsets[unit], unit.numel)

    def messages(self, units: Sequence[UnitGradients]) -> list[torch.Tensor]:
        """The partial sums of `units` as few contiguous 1-D tensors: one where all of a bucket lies in one buffer."""
        runs: list[tuple[torch.Tensor, int, int]] = []
        for unit in sorted(units, key=lambda u: self._offsets[u]):
            buffer = self._flat if unit.sums_in_flat else self._side
            assert buffer is not None
            start = self._offsets[unit]
            if runs and runs[-1][0] is buffer and runs[-1][2] == start:
                runs[-1] = (buffer, runs[-1][1], start + unit.numel)
            else:
                runs.append((buffer, start, start + unit.numel))
        return [self._message(buffer, start, end) for buffer, start, end in runs]

    def _message(self, buffer: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if buffer is not self._flat:
            return buffer.narrow(0, start, end - start)
        # A thread of gloo drops a message a moment after whoever waited for it goes on. A view of each message that
        # lives as long as the buffer makes that invisible to those who count who holds the buffer.
        message = self._flat_messages.get((start, end))
        if message is None:
            message = self._flat_messages[start, end] = buffer.narrow(0, start, end - start)
            self._own_references += 1
        return message

    def abandon(self) -> None:
        """Drops every sum and what is known of the round."""
        for unit in self.units:
            unit.partial, unit.is_in_flight = None, False
        self.round, self.tickets, self._side = {}, [], None


def compose(sizes: Sequence[int], limit: int) -> list[int]:
    """How many consecutive entries of `sizes` each bucket takes: as many as fit into `limit` bytes, at least one."""
    counts: list[int] = []
    used = 0
    for size in sizes:
        if counts and used + size <= limit:
            counts[-1] += 1
            used += size
        else:
            counts.append(1)
            used = size
    return counts
