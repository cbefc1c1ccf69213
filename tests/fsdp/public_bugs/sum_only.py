"""A back end like HCCL and XCCL: gloo underneath, but reductions other than SUM are refused, nothing is coalesced."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

SUM_ONLY = "sumonly"


class SumOnlyError(RuntimeError):
    """A reduction that the back end does not have was asked of it."""


def register_sum_only_backend() -> None:
    """Makes `SUM_ONLY` a back end of this process."""
    dist.Backend.register_backend(SUM_ONLY, _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: Any) -> SumOnlyGroup:
    return SumOnlyGroup(dist.ProcessGroupGloo(store, rank, size, timeout))


class SumOnlyGroup(dist.ProcessGroup):
    """Forwards to gloo what HCCL has. Methods carry the names of torch 2.7 and, where they were renamed, of 2.13."""

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo

    def getBackendName(self) -> str:  # noqa: N802
        return SUM_ONLY

    @property
    def group_name(self) -> str:
        """Where torch asks for the name of a group that is written in Python, it is in its own table."""
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        _check(opts.reduceOp)
        return self._gloo.allreduce([tensors] if isinstance(tensors, Tensor) else tensors, opts)

    def _reduce_scatter_base(self, output: Tensor, operand: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        _check(opts.reduceOp)
        return self._gloo._reduce_scatter_base(output, operand, opts)

    reduce_scatter_single = _reduce_scatter_base

    def _allgather_base(self, output: Tensor, operand: Tensor, opts: Any = None) -> Any:
        return self._gloo._allgather_base(output, operand, *([] if opts is None else [opts]))

    all_gather_single = _allgather_base

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _check(operation: Any) -> None:
    if operation != dist.ReduceOp.SUM:
        raise SumOnlyError(f"this back end has no {operation}")
