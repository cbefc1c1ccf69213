"""Reducing between supernodes where some gradients are needed on one replica alone.

An all-reduce over R replicas is a reduce-scatter and an all-gather. What one replica alone will use needs only the
first half: (R - 1) / R of the bytes instead of twice that. Gradients of a bucket are packed by the replica that wants
them, exchanged at once, and added up in the order of replicas; those that all replicas want are packed too and
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hp_plugin.core.kernels import sum_in_order_
from hp_plugin.core.transport import Pending, all_reduce_sum


class Segment(NamedTuple):
    """Consecutive elements of a unit's partial sum.

    Attributes:
        start: First element.
        length: How many.
        owner: Position in the group of the replicas of the one that wants their sum; None: all do.
    """

    start: int
    length: int
    owner: int | None


class OwnerReduction(Pending):
    """The sums of a bucket on their way.

    Args:
        sums: Partial sums of this replica, 1-D, in an order on which all ranks agree; overwritten by `wait` where this
            rank wants the result, and left alone elsewhere.
        segments: Of each of them, what covers it.
        group: The replicas. Every rank must construct.
        wire_dtype: In which sums cross.
    """

    def __init__(
        self,
        sums: Sequence[torch.Tensor],
        segments: Sequence[Sequence[Segment]],
        group: dist.ProcessGroup,
        wire_dtype: torch.dtype,
    ) -> None:
        super().__init__((), ())
        self._position = dist.get_rank(group)
        replicas = range(dist.get_world_size(group))
        by_owner: dict[int | None, list[torch.Tensor]] = {each: [] for each in (None, *replicas)}
        for total, parts in zip(sums, segments, strict=True):
            for start, length, owner in parts:
                by_owner[owner].append(total.narrow(0, start, length))
        self._shared, self._own = by_owner.pop(None), by_owner[self._position]
        self._device = sums[0].device
        self._own_packed = self._packed(self._own, wire_dtype)
        sent = [[] if owner == self._position else parts for owner, parts in by_owner.items()]
        source = self._packed([part for parts in sent for part in parts], wire_dtype)
        own_numel = self._own_packed.numel()
        self._received = [0 if owner == self._position else own_numel for owner in by_owner]
        self._output = torch.empty(sum(self._received), dtype=wire_dtype, device=self._device)
        counts = [sum(part.numel() for part in parts) for parts in sent]
        self.exchanged_bytes = (source.numel() + self._output.numel()) * wire_dtype.itemsize
        work = dist.all_to_all_single(self._output, source, self._received, counts, group=group, async_op=True)
        self._exchange = Pending([work], [source, self._output])
        self._all_reduced = self._packed(self._shared, wire_dtype)
        self._all_reduce = all_reduce_sum(self._all_reduced, group) if self._shared else None
        self._is_done = False

    def _packed(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        numel = sum(part.numel() for part in parts)
        packed = torch.empty(numel, dtype=dtype, device=self._device)
        if parts:
            torch._foreach_copy_(list(packed.split([part.numel() for part in parts])), list(parts))
        return packed

    def wait(self) -> None:
        """Leaves the sums where this rank wants them. Idempotent."""
        if self._is_done:
            return
        self._is_done = True
        self._exchange.wait()
        if self._own:
            terms = list(self._output.split(self._received))
            terms[self._position] = self._own_packed
            total = torch.empty_like(self._own_packed, dtype=self._own[0].dtype)
            sum_in_order_(total, terms)
            torch._foreach_copy_(self._own, list(total.split([part.numel() for part in self._own])))
        if self._all_reduce is not None:
            self._all_reduce.wait()
            parts = self._all_reduced.split([part.numel() for part in self._shared])
            torch._foreach_copy_(self._shared, list(parts))
        self._own, self._shared = [], []
