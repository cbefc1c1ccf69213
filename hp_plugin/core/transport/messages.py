"""All-gather and reduce-scatter as messages between every two ranks of a group, for back ends whose own are slow."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.kernels import sum_in_order_
from hp_plugin.core.transport.lane import Lane, Ticket
from hp_plugin.core.transport.pending import Pending, Prepare, bytes_of

_FIRST_TAG = 1 << 20
"""Above what anyone else would choose for messages of his own in our groups."""
_TAGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class PendingGather(Pending):
    """An all-gather as messages between ranks, prepared and issued on a lane.

    Args:
        prepare: As of `C10dTransport.all_gather`.
        after: The same.
        link: How slices travel.
        lane: Where they are issued.
    """

    __slots__ = ("_ticket",)

    def __init__(self, prepare: Prepare, after: Ticket | None, link: Messages, lane: Lane) -> None:
        super().__init__((), ())

        def issue() -> None:
            if after is not None:
                after.wait()
            outputs, inputs = prepare()
            self._keep = [*outputs, *inputs]
            self.operand_bytes = bytes_of(outputs)
            self._works, self.copied_bytes = link.gather(outputs, inputs)

        self._ticket = lane.submit(issue)

    def wait(self) -> None:
        """Blocks until every slice is here and has been sent. Idempotent."""
        self._ticket.wait()
        super().wait()


class PendingExchange(Pending):
    """A reduce-scatter as an exchange of slices. `wait` issues it, on whatever thread, and adds up what arrives.

    Args:
        outputs: 1-D tensors.
        operands: What is summed into them.
        link: How slices travel.
    """

    __slots__ = ("_link", "_operands", "_outputs")

    def __init__(self, outputs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], link: Messages) -> None:
        super().__init__((), ())
        self._outputs, self._operands, self._link = list(outputs), list(operands), link

    def wait(self) -> None:
        """Leaves the sums, formed in rank order, in the outputs. Idempotent.

        What an operand held is let go as soon as it is summed, so memory falls while the rest is still under way.
        """
        exchanges = [self._link.exchange(*pair) for pair in zip(self._outputs, self._operands)]
        self._outputs, self._operands = [], []
        exchanges.reverse()
        while exchanges:
            exchanges.pop().finish()


class PendingOrderedSum(Pending):
    """A reduce-scatter as an exchange of slices in one collective each, and a sum in rank order.

    For back ends whose own reduce-scatter adds up in an order of its own, where the order matters.

    Args:
        outputs: 1-D tensors.
        operands: What is summed into them.
        group: The group.
    """

    __slots__ = ("_outputs", "_received", "_size")

    def __init__(
        self, outputs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        self._outputs = list(outputs)
        self._received = [torch.empty_like(operand) for operand in operands]
        exchanges = zip(self._received, operands)
        works = [group.alltoall_base(received, operand, [], []) for received, operand in exchanges]
        super().__init__(works, [*operands])
        self.temporaries = self._received
        self._size = group.size()

    def wait(self) -> None:
        """Leaves the sums in the outputs. Idempotent."""
        super().wait()
        for output, received in zip(self._outputs, self._received):
            sum_in_order_(output, received.view(self._size, -1).unbind())
        self._outputs, self._received = [], []


@dataclass
class Exchange:
    """One operand of a reduce-scatter on its way: every rank sends every other rank that rank's slice.

    Attributes:
        output: Where the sum goes.
        slices: By rank: what it contributes to the sum. This rank's is a view of its operand, the others are receiving,
            one of them in `output`.
        receives: What fills the slices of the others.
        sends: What reads the operand.
        operand: Kept alive until it has been read.
    """

    output: torch.Tensor
    slices: list[torch.Tensor]
    receives: list[Any]
    sends: list[Any]
    operand: torch.Tensor

    def finish(self) -> None:
        """Waits for the messages and sums."""
        for work in self.receives:
            work.wait()
        sum_in_order_(self.output, self.slices)
        for work in self.sends:
            work.wait()


class Messages:
    """All-gather and reduce-scatter of one unit as messages between every two ranks of a group.

    Messages of one tag between two ranks match in the order of their issue. Each unit has tags of its own, one for each
    direction, so that its gathers and its reductions may be issued by two threads, and units by as many as they like.

    Args:
        group: Every rank of it must make its objects of this class in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._others = [(self._rank + step) % self._size for step in range(1, self._size)]
        tags = _TAGS.setdefault(group, itertools.count(_FIRST_TAG))
        self._gather_tag, self._reduce_tag = next(tags), next(tags)

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[list[Any], int]:
        """Issues an all-gather. Returns what is to be waited for, and how many bytes were copied on this rank."""
        works = []
        parts = [output.view(self._size, -1) for output in outputs]
        for part in parts:
            works += [self._group.recv([part[other]], other, self._gather_tag) for other in self._others]
        for own in inputs:
            works += [self._group.send([own], other, self._gather_tag) for other in self._others]
        copied = 0
        for part, own in zip(parts, inputs):
            mine = part[self._rank]
            if mine.data_ptr() != own.data_ptr():
                mine.copy_(own)
                copied += mine.numel() * mine.dtype.itemsize
        return works, copied

    def exchange(self, output: torch.Tensor, operand: torch.Tensor) -> Exchange:
        """Issues the reduce-scatter of one operand."""
        mine = operand.view(self._size, -1)
        slices = [mine[self._rank]] * self._size
        # The first addition reads slices 0 and 1, so the one of them that comes from elsewhere may lie in the output.
        in_output = 1 if self._rank == 0 else 0
        for other in self._others:
            slices[other] = output if other == in_output else torch.empty_like(output)
        tag = self._reduce_tag
        receives = [self._group.recv([slices[other]], other, tag) for other in self._others]
        sends = [self._group.send([mine[other]], other, tag) for other in self._others]
        return Exchange(output, slices, receives, sends, operand)
