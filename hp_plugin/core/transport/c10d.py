"""Collectives of one unit through torch.distributed, on any backend.

Every parameter is gathered straight into its full tensor and reduced straight out of its gradient, so nothing is
packed. All parameters of a unit leave in one coalesced launch where the backend has one and gains from it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.devices import Capabilities, backend_capabilities
from hp_plugin.core.transport.lane import Lane, Ticket, lane_of

Prepare = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]

# gloo runs a reduce-scatter as an all-reduce of a copy of the operand. Sending every rank its slice and adding up what
# arrives moves half the bytes, needs no copy and takes a fraction of the time (4 operands, 3 MB in all, 2 ranks: 2 ms
# instead of 7.3). Its all-gather wakes a thread for each operand and copies once more: messages take half the CPU time
# and half the time (5 operands, 3.1 MB in all, 2 ranks: 3 ms instead of 6; coalesced, which packs, 4.6).
_BETTER_BY_MESSAGES = frozenset({"gloo"})


class Pending:
    """Collectives in flight, and the tensors that must live until they are done.

    Attributes:
        operand_bytes: Of an all-gather, bytes of its outputs. Final after `wait`, as:
        copied_bytes: What the transport copied on this rank outside the back end.
    """

    __slots__ = ("_keep", "_works", "copied_bytes", "operand_bytes")

    def __init__(self, works: Sequence[Any], keep: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._keep: Sequence[torch.Tensor] = keep
        self.operand_bytes = self.copied_bytes = 0

    def wait(self) -> None:
        """Makes the results visible: blocks the host on gloo, the current stream on a device. Idempotent."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = ()
        self._keep = ()


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
            self.operand_bytes = _bytes_of(outputs)
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
        _sum_in_order(self.output, self.slices)
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


_FIRST_TAG = 1 << 20
"""Above what anyone else would choose for messages of his own in our groups."""
_TAGS: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class PendingCopies(Pending):
    """The reduce-scatter of a group of one rank: `wait` copies inputs to outputs.

    Args:
        outputs: 1-D tensors.
        inputs: Tensors of the same lengths.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__((), list(inputs))
        self._outputs = outputs

    def wait(self) -> None:
        """Copies. Idempotent."""
        for output, operand in zip(self._outputs, self._keep):
            output.copy_(operand)
        self._outputs = ()
        super().wait()


class C10dTransport:
    """All-gather and reduce-scatter inside one shard group.

    Collectives are called on the process group itself: the functions of `torch.distributed` check and convert what is
    right by construction here, at twice the host time.

    Args:
        group: The shard group. Every rank of it must call every method in the same order; one thread per group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.capabilities: Capabilities = backend_capabilities(group)
        self._sum = dist.ReduceScatterOptions()
        self._sum.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # a RedOpType, as in torch's own code
        self._messages = Messages(group) if self.capabilities.backend in _BETTER_BY_MESSAGES else None

    def all_gather(self, prepare: Prepare, *, after: Ticket | None = None) -> Pending:
        """Gathers each input of all ranks, in rank order, into its output.

        Args:
            prepare: Allocates and fills the operands and returns (outputs, inputs): contiguous 1-D tensors, each output
                `group.size()` times as long as its input. An input has the same length on every rank and may be this
                rank's slice of its output. On gloo it is called on another thread; else before this returns.
            after: Where host memory is at stake, thus on gloo: a job before whose end nothing is prepared.

        Returns:
            The collective in flight.
        """
        if self._messages is not None:
            return PendingGather(prepare, after, self._messages, lane_of(self.group, "cpu", role="gather"))
        outputs, inputs = prepare()
        works: list[Any] = []
        for outs, ins in _launches(outputs, inputs, coalesce=self.capabilities.coalesced_all_gather):
            if len(outs) > 1:
                works.append(self.group.allgather_into_tensor_coalesced(outs, ins))
            else:
                works.append(self.group._allgather_base(outs[0], ins[0]))
        pending = Pending(works, [*outputs, *inputs])
        pending.operand_bytes = _bytes_of(outputs)
        return pending

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        """Sums `inputs[i]` over all ranks and leaves this rank's slice of the sum in `outputs[i]`.

        Args:
            outputs: Contiguous 1-D tensors.
            inputs: Contiguous 1-D tensors of the outputs' dtype, each `group.size()` times as long as its output.
                They must not change before the returned handle has been waited for.

        Returns:
            The collective in flight. Its `wait` may run on another thread; on gloo it does all of the work, and must
            be called on every rank.
        """
        if self._messages is not None:
            return PendingExchange(outputs, inputs, self._messages)
        works: list[Any] = []
        for outs, ins in _launches(outputs, inputs, coalesce=self.capabilities.coalesced_reduce_scatter):
            if len(outs) > 1:
                works.append(self.group.reduce_scatter_tensor_coalesced(outs, ins, self._sum))
            else:
                works.append(self.group._reduce_scatter_base(outs[0], ins[0], self._sum))
        return Pending(works, [*outputs, *inputs])


def all_reduce_sum(buffer: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sums `buffer` over the ranks of `group` in place, asynchronously. Every rank of the group must call."""
    return Pending([dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group, async_op=True)], [buffer])


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _sum_in_order(output: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Sets `output` to the sum of two or more terms, added in the order given and rounded once to its dtype."""
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=output)
        return
    is_wide = output.dtype in (torch.float32, torch.float64)
    total = output if is_wide else torch.empty_like(output, dtype=torch.float32)
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
    if not is_wide:
        output.copy_(total)


def _launches(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, coalesce: bool
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Splits a unit's operands into launches: one per dtype when coalesced, else one per operand."""
    if not coalesce or len(outputs) == 1:
        return [([o], [i]) for o, i in zip(outputs, inputs)]
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for out, inp in zip(outputs, inputs):
        outs, ins = by_dtype.setdefault(inp.dtype, ([], []))
        outs.append(out)
        ins.append(inp)
    return list(by_dtype.values())
