"""Collectives of one unit through torch.distributed, on any backend.

Every parameter is gathered straight into its full tensor and reduced straight out of its gradient, so nothing is
packed. All parameters of a unit leave in one coalesced launch where the backend has one and gains from it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.devices import Capabilities, backend_capabilities
from hp_plugin.core.transport.lane import Ticket, lane_of
from hp_plugin.core.transport.messages import Messages, PendingExchange, PendingGather, PendingOrderedSum
from hp_plugin.core.transport.pending import Pending, Prepare, bytes_of
from hp_plugin.errors import UnsupportedError

# gloo runs a reduce-scatter as an all-reduce of a copy of the operand. Sending every rank its slice and adding up what
# arrives moves half the bytes, needs no copy and takes a fraction of the time (4 operands, 3 MB in all, 2 ranks: 2 ms
# instead of 7.3). Its all-gather wakes a thread for each operand and copies once more: messages take half the CPU time
# and half the time (5 operands, 3.1 MB in all, 2 ranks: 3 ms instead of 6; coalesced, which packs, 4.6).
_BETTER_BY_MESSAGES = frozenset({"gloo"})


class C10dTransport:
    """All-gather and reduce-scatter inside one shard group.

    Collectives are called on the process group itself: the functions of `torch.distributed` check and convert what is
    right by construction here, at twice the host time.

    Args:
        group: The shard group. Every rank of it must make its objects of this class, and call their methods, in the
            same order.
    """

    adds_in_rank_order = False
    """Whether sums must be formed in rank order. Messages do so anyway, the collectives of back ends do not."""

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
        pending.operand_bytes = bytes_of(outputs)
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
        if self.adds_in_rank_order:
            if not self.capabilities.all_to_all:
                raise UnsupportedError(
                    f"deterministic=True exchanges slices by all-to-all, which hp_plugin does not know of the back end "
                    f"{self.capabilities.backend}; use deterministic=False"
                )
            return PendingOrderedSum(outputs, inputs, self.group)
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
