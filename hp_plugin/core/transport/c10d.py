"""Collectives of one unit through torch.distributed, on any backend.

Every parameter is gathered straight into its full tensor and reduced straight out of its gradient, so nothing is
packed. All parameters of a unit leave in one coalesced launch where the backend has one and gains from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.devices import Capabilities, backend_capabilities

# torch 2.13 renamed the flat collectives and deprecates the names that 2.7 has.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# gloo runs a reduce-scatter as an all-reduce of a copy. Exchanging slices and adding them up in rank order moves half
# the bytes, needs no copy of what this rank sends and takes 40 % of the time (4 operands, 3 MB in all, 2 ranks: 2.8 ms
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
        works: The exchanges.
        outputs: Where the sums go, 1-D.
        received: What the exchanges write: one slice of `outputs[i].numel()` elements per rank, in rank order.
        inputs: What they read.
    """

    __slots__ = ("_outputs", "_received")

    def __init__(
        self,
        works: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(works, inputs)
        self._outputs = outputs
        self._received = received

    def wait(self) -> None:
        """Blocks until every slice is here and leaves the sums, formed in rank order, in the outputs. Idempotent."""
        super().wait()
        for output, received in zip(self._outputs, self._received):
            _sum_slices(output, received)
        self._outputs = self._received = ()


class PendingCopies(Pending):
    """The reduce-scatter of a group of one rank: `wait` copies inputs to outputs.

    Args:
        outputs: 1-D tensors.
        inputs: Tensors of the same lengths.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__((), inputs)
        self._outputs = outputs

    def wait(self) -> None:
        """Copies. Idempotent."""
        for output, operand in zip(self._outputs, self._keep):
            output.copy_(operand)
        self._outputs = ()
        super().wait()


class C10dTransport:
    """All-gather and reduce-scatter inside one shard group.

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
                works.append(_all_gather_flat(outs[0], ins[0], group=self.group, async_op=True))
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
        for outs, ins in _launches(outputs, inputs, coalesce=self.capabilities.coalesced_reduce_scatter):
            if len(outs) > 1:
                options = dist.ReduceScatterOptions()
                options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # a RedOpType, as in torch's own code
                works.append(self.group.reduce_scatter_tensor_coalesced(outs, ins, options))
            else:
                works.append(
                    _reduce_scatter_flat(outs[0], ins[0], op=dist.ReduceOp.SUM, group=self.group, async_op=True)
                )
        return Pending(works, [*outputs, *inputs])

    def _exchange(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        received = [torch.empty_like(operand) for operand in inputs]
        works = [
            dist.all_to_all_single(into, operand, group=self.group, async_op=True)
            for into, operand in zip(received, inputs)
        ]
        return PendingExchange(works, outputs, received, inputs)


def all_reduce_sum(buffer: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sums `buffer` over the ranks of `group` in place, asynchronously. Every rank of the group must call."""
    return Pending([dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group, async_op=True)], [buffer])


def _sum_slices(output: torch.Tensor, received: torch.Tensor) -> None:
    """Sums the equal slices of `received` into `output`, always in the same order."""
    slices = received.view(-1, output.numel())
    if len(slices) == 2:
        torch.add(slices[0], slices[1], out=output)  # one pass; for narrow dtypes exact before its one rounding
    else:
        torch.sum(slices, dim=0, out=output)


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
