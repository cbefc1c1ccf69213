"""A ring of gradients: what a rank has written for its peers to add up, in memory that all of them read.

Every rank of the group has a ring of its own in the segment. Units enter their gradients in the same order and with the
same sizes on all ranks, so an entry lies at the same place in each ring. An entry's life has two counters:

* `ready`: the rank has written it. Its peers may read it once they need it.
* `done`: the rank has added up its slices of that entry of all rings. When every rank has, the place is free again.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_plugin.core.kernels import sum_in_order_
from hp_plugin.core.transport.pending import Pending
from hp_plugin.core.transport.shm.errors import PeerError, named
from hp_plugin.core.transport.shm.segment import Segment
from hp_plugin.core.transport.shm.signals import Signals

ALIGNMENT = 64
"""Bytes. Operands start at cache lines, behind a header of one."""


def entry_bytes(operand_bytes: Sequence[int]) -> int:
    """Bytes of an entry with operands of these sizes."""
    return ALIGNMENT + sum(_aligned(nbytes) for nbytes in operand_bytes)


class RingPlaces:
    """Where entries lie in a ring: plain arithmetic, so that all ranks come to the same.

    Args:
        capacity: Bytes of the ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._end = 0
        self._count = 0
        self._live: deque[tuple[int, int, int]] = deque()  # (number, start, end), oldest first

    def place(self, nbytes: int) -> tuple[int, int, int]:
        """A place for the next entry.

        Args:
            nbytes: Its size, at most the capacity.

        Returns:
            The number of the entry (0, 1, ...), its first byte, and how many entries must be done before it is written.
        """
        assert nbytes <= self.capacity, f"an entry of {nbytes} bytes in a ring of {self.capacity}"
        start = self._end if self._end + nbytes <= self.capacity else 0
        end, must_be_done = start + nbytes, 0
        overlaps = [number for number, low, high in self._live if low < end and start < high]
        while overlaps and self._live and self._live[0][0] <= overlaps[-1]:
            must_be_done = self._live.popleft()[0] + 1
        number, self._count, self._end = self._count, self._count + 1, end
        self._live.append((number, start, end))
        return number, start, must_be_done


@dataclass
class RingSlots:
    """An entry that this rank is writing.

    Attributes:
        number: Of the entry.
        offset: First byte in the ring.
        unit: Index of the unit.
        operands: Where its gradients are to be written, 1-D. Nobody but this rank reads its own slices.
        offsets: First byte of each operand, from the start of the ring.
        header: What the entry starts with, alike on all ranks: its number, the unit, and a digest of its operands.
    """

    number: int
    offset: int
    unit: int
    operands: list[torch.Tensor]
    offsets: list[int]
    header: tuple[int, int, int]


class GradientRing:
    """The rings of a group.

    Args:
        segment: Where they lie.
        offset: First byte of the first rank's ring; the others follow.
        capacity: Bytes of each.
        signals: Counters.
        rows: Rows of `ready` and `done` in `signals`.
        name_of: The name of a unit, by index, for messages.
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        *,
        capacity: int,
        signals: Signals,
        rows: tuple[int, int],
        name_of: Callable[[int], str],
    ) -> None:
        self._segment = segment
        self._places = RingPlaces(capacity)
        self._starts = [offset + rank * capacity for rank in range(segment.size)]
        self._signals = signals
        self._ready, self._done = rows
        self._name_of = name_of
        self.room_waits, self.room_wait_seconds = 0, 0.0
        """How often, and how long, an entry had to wait for its place."""

    def place(self, unit: int, numels: Sequence[int], dtype: torch.dtype) -> tuple[RingSlots, int]:
        """Chooses the place of the next entry. Entries are written, and given to `reduce_scatter`, in this order.

        Args:
            unit: Index of the unit.
            numels: Elements of its operands.
            dtype: Of its operands.

        Returns:
            The entry, and how many entries must be done before it may be written, see `is_free` and `wait_until_free`.
        """
        nbytes = [numel * dtype.itemsize for numel in numels]
        number, offset, must_be_done = self._places.place(entry_bytes(nbytes))
        start = self._starts[self._segment.rank]
        offsets, end = [], offset + ALIGNMENT
        for each in nbytes:
            offsets.append(end)
            end += _aligned(each)
        operands = [self._segment.tensor(start + at, numel, dtype) for at, numel in zip(offsets, numels)]
        # A digest, not a hash: it must be the same in every process.
        header = (number, unit, zlib.crc32(repr((list(numels), dtype)).encode()))
        return RingSlots(number, offset, unit, operands, offsets, header), must_be_done

    def is_free(self, must_be_done: int) -> bool:
        """Whether every rank is done with so many entries."""
        return must_be_done == 0 or self._signals.has_reached(self._done, must_be_done)

    def wait_until_free(self, must_be_done: int, unit: int) -> None:
        """Waits until every rank is done with so many entries, and counts it where it must. Raises PeerError."""
        if self.is_free(must_be_done):
            return
        start = time.perf_counter()
        self._signals.wait(
            self._done, must_be_done, lambda: f"add up earlier gradients, in backward of unit {self._name_of(unit)}"
        )
        self.room_waits += 1
        self.room_wait_seconds += time.perf_counter() - start

    def reduce_scatter(
        self, entry: RingSlots, outputs: Sequence[torch.Tensor], *, own: Sequence[torch.Tensor] | None = None
    ) -> Pending:
        """Lets the peers read an entry that has been written.

        Args:
            entry: The entry.
            outputs: Where this rank's slices of the sums go, 1-D, one per operand.
            own: This rank's own slices, wherever they are, 1-D, one per operand; each is dropped when it has been
                added. None: they are in the entry.

        Returns:
            What waits for the peers' entries and adds up, on whatever thread.
        """
        self._write_header(entry)
        self._signals.publish(self._ready, entry.number + 1)
        return _PendingSum(self, entry, outputs, own)

    def _write_header(self, entry: RingSlots) -> None:
        header = self._header(self._segment.rank, entry)
        for index, word in enumerate(entry.header):
            header[index] = word

    def _header(self, rank: int, entry: RingSlots) -> ctypes.Array[ctypes.c_uint64]:
        return _Header.from_address(self._segment.address + self._starts[rank] + entry.offset)

    def add_up(self, entry: RingSlots, outputs: Sequence[torch.Tensor], own: list[torch.Tensor]) -> None:
        """Waits for the peers' entries and leaves this rank's slices of the sums, in rank order, in `outputs`.

        `own` are its terms of them, and is emptied on the way; empty from the start: those of its entry.
        """
        try:
            self._signals.wait(
                self._ready,
                entry.number + 1,
                lambda: f"write its gradients of unit {self._name_of(entry.unit)} in backward",
            )
            self._check_headers(entry)
            for output, operand, offset in zip(outputs, entry.operands, entry.offsets):
                at = offset + self._segment.rank * output.numel() * operand.dtype.itemsize
                self._sum(output, at, operand.dtype, own.pop(0) if own else None)
            self._signals.publish(self._done, entry.number + 1)
        except BaseException as error:
            self._signals.failure = error  # whoever waits for `done` of this rank waits in vain
            raise

    def _sum(self, output: torch.Tensor, offset: int, dtype: torch.dtype, own: torch.Tensor | None) -> None:
        terms = [self._segment.tensor(start + offset, output.numel(), dtype) for start in self._starts]
        if own is not None:
            terms[self._segment.rank] = own
        sum_in_order_(output, terms)

    def _check_headers(self, entry: RingSlots) -> None:
        for rank in range(self._segment.size):
            found = tuple(self._header(rank, entry))
            if found != entry.header:
                raise PeerError(self._difference(entry, rank, found))

    def _difference(self, entry: RingSlots, rank: int, found: tuple[int, ...]) -> str:
        name, peer = self._name_of(entry.unit), named(self._segment.group, [rank])
        text = f"in backward, rank {dist.get_rank()} reduces gradients of unit {name} where {peer} reduces "
        number, unit, _ = found
        if number != entry.number:  # what is read there is no header: entries before this one had other sizes
            return f"{text}others: {_SAME}"
        if unit != entry.unit:
            return f"{text}those of unit {self._name_of(unit)}: {_SAME}"
        return (
            f"{text}other parameters of that unit, or in another dtype: requires_grad and mixed precision must be "
            "alike on all ranks"
        )


_Header = ctypes.c_uint64 * 3
_SAME = "all ranks must run the same units in the same order"


class _PendingSum(Pending):
    __slots__ = ("_entry", "_outputs", "_own", "_ring")

    def __init__(
        self,
        ring: GradientRing,
        entry: RingSlots,
        outputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] | None,
    ) -> None:
        super().__init__((), ())
        self._ring, self._entry = ring, entry
        self._outputs, self._own = list(outputs), list(own or ())

    def wait(self) -> None:
        """Adds up. Idempotent."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._ring.add_up(self._entry, outputs, self._own)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
