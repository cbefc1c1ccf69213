"""Collectives of one unit through torch.distributed, on any backend.

Every parameter is gathered straight into its full tensor and reduced straight out of its gradient, so nothing is
packed. All parameters of a unit leave in one coalesced launch where the backend has one and gains from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.devices import Capabilities, backend_capabilities

# gloo runs a reduce-scatter as an all-reduce of a copy of the operand. Sending every rank its slice and adding up what
# arrives moves half the bytes, needs no copy and takes a fraction of the time (4 operands, 3 MB in all, 2 ranks: 2 ms
# instead of 7.3).
_REDUCES_WHOLE_OPERANDS = frozenset({"gloo"})

# gloo's coalesced all-gather packs all operands into a buffer of its own and unpacks it afterwards; separate calls, all
# in flight at once, take a third of its time (10 operands of 1.6 MB, 2 ranks). Its coalesced reduce-scatter does not.
_PACKS_COALESCED_ALL_GATHER = frozenset({"gloo"})


class Pending:
    """Collectives in flight, and the tensors that must live until they are done."""

    __slots__ = ("_keep", "_works")

    def __init__(self, works: Sequence[Any], keep: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._keep: Sequence[torch.Tensor] = keep

    def wait(self) -> None:
        """Makes the results visible: blocks the host on gloo, the current stream on a device. Idempotent."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = ()
        self._keep = ()


class PendingExchange(Pending):
    """A reduce-scatter as an exchange of slices in flight; `wait` adds them up.

    Args:
        exchanges: One per operand.
    """

    __slots__ = ("_exchanges",)

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        super().__init__((), ())
        self._exchanges = list(exchanges)

    def wait(self) -> None:
        """Blocks until every slice is here and leaves the sums, formed in rank order, in the outputs. Idempotent.

        What an operand held is let go as soon as it is summed, so memory falls while the rest is still under way.
        """
        self._exchanges.reverse()
        while self._exchanges:
            self._exchanges.pop().finish()


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

    @classmethod
    def start(cls, output: torch.Tensor, operand: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
        """Issues the messages. Every rank of the group must call, in the same order."""
        rank, size = group.rank(), group.size()
        mine = operand.view(size, -1)
        others = [(rank + step) % size for step in range(1, size)]
        slices = [mine[rank]] * size
        # The first addition reads slices 0 and 1, so the one of them that comes from elsewhere may lie in the output.
        in_output = 1 if rank == 0 else 0
        for other in others:
            slices[other] = output if other == in_output else torch.empty_like(output)
        receives = [group.recv([slices[other]], other, _TAG) for other in others]
        sends = [group.send([mine[other]], other, _TAG) for other in others]
        return cls(output, slices, receives, sends, operand)

    def finish(self) -> None:
        """Waits for the messages and sums."""
        for work in self.receives:
            work.wait()
        _sum_in_order(self.output, self.slices)
        for work in self.sends:
            work.wait()


_TAG = 0
"""Messages between two ranks match in the order of their issue."""


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
        self._coalesce_all_gather = (
            self.capabilities.coalesced_all_gather and self.capabilities.backend not in _PACKS_COALESCED_ALL_GATHER
        )
        self._exchanges = self.capabilities.backend in _REDUCES_WHOLE_OPERANDS

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        """Gathers `inputs[i]` of all ranks, in rank order, into `outputs[i]`.

        Args:
            outputs: Contiguous 1-D tensors, each `group.size()` times as long as its input.
            inputs: Contiguous 1-D tensors, of the same length on every rank; may be this rank's slice of the output.

        Returns:
            The collective in flight.
        """
        works: list[Any] = []
        for outs, ins in _launches(outputs, inputs, coalesce=self._coalesce_all_gather):
            if len(outs) > 1:
                works.append(self.group.allgather_into_tensor_coalesced(outs, ins))
            else:
                works.append(self.group._allgather_base(outs[0], ins[0]))
        return Pending(works, [*outputs, *inputs])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        """Sums `inputs[i]` over all ranks and leaves this rank's slice of the sum in `outputs[i]`.

        Args:
            outputs: Contiguous 1-D tensors.
            inputs: Contiguous 1-D tensors of the outputs' dtype, each `group.size()` times as long as its output.
                They must not change before the returned handle has been waited for.

        Returns:
            The collective in flight. Its `wait` may run on another thread; on gloo it does the summing.
        """
        if self._exchanges:
            return self._exchange(outputs, inputs)
        works: list[Any] = []
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # a RedOpType, as in torch's own code
        for outs, ins in _launches(outputs, inputs, coalesce=self.capabilities.coalesced_reduce_scatter):
            if len(outs) > 1:
                works.append(self.group.reduce_scatter_tensor_coalesced(outs, ins, options))
            else:
                works.append(self.group._reduce_scatter_base(outs[0], ins[0], options))
        return Pending(works, [*outputs, *inputs])

    def _exchange(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        return PendingExchange([Exchange.start(out, operand, self.group) for out, operand in zip(outputs, inputs)])


def all_reduce_sum(buffer: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sums `buffer` over the ranks of `group` in place, asynchronously. Every rank of the group must call."""
    return Pending([dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group, async_op=True)], [buffer])


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
    if not coalesce:
        return [([o], [i]) for o, i in zip(outputs, inputs)]
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for out, inp in zip(outputs, inputs):
        outs, ins = by_dtype.setdefault(inp.dtype, ([], []))
        outs.append(out)
        ins.append(inp)
    return list(by_dtype.values())
