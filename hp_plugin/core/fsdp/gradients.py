"""The sharded gradients of a unit: where the reduce-scatter writes, what waits for the slow link, what becomes `.grad`.

A unit's gradients fill one contiguous slice of its bucket's buffer (`bucket.py`). There are two such buffers:

* flat, permanent, where the optimizer wants the dtype in which we reduce. When no parameter of the unit has a gradient,
  the reduction runs in it and `.grad` becomes a view of it. Nothing is copied.
* side, for the time of a reduction. What `.grad` holds is reduced and scaled already and must be neither reduced nor
  scaled again, so a new sum is kept apart from it until it may be added.

The sum of micro-batches that is not yet reduced between supernodes is the unit's `partial`, in one of the two.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.operand import Operand
from hp_plugin.core.fsdp.owner_reduction import Segment
from hp_plugin.core.fsdp.parameter import ShardedParameter
from hp_plugin.core.fsdp.slot import aligned_offsets
from hp_plugin.core.kernels import accumulate_scaled_, scale_copy_
from hp_plugin.core.layout import local_tensor

_ALIGNMENT = 32
"""Elements. Slots start at multiples of 64 bytes in every floating dtype of two bytes or more."""


class UnitGradients:
    """Gradient storage of the parameters of one unit that require a gradient.

    Args:
        name: Name of the unit.
        operands: Those parameters as operands of the reduce-scatter, in the order of their slots. Fixed for life.
        dtype: Dtype of the sums.
        counters: Where copies and DTensor constructions are counted.
        owners: Of each parameter, the global rank that alone of the replicas wants its gradient; None if all do.
        replicas: Ranks that hold the same shards; None where there is one replica.
    """

    def __init__(
        self,
        name: str,
        operands: Sequence[Operand],
        dtype: torch.dtype,
        counters: Counters,
        *,
        owners: Mapping[ShardedParameter, int | None] | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.operands = list(operands)
        self.parameters: list[ShardedParameter] = [p for operand in operands for p in operand.parameters]
        self.dtype = dtype
        self._counters = counters
        self._owners: dict[ShardedParameter, int] = {}
        """Position among the replicas of the one that alone wants the gradient of a parameter."""
        self._is_wanted = [True] * len(self.parameters)
        if replicas is not None and owners is not None:
            self._owners = {p: dist.get_group_rank(replicas, o) for p, o in owners.items() if o is not None}
            mine = dist.get_rank(replicas)
            self._is_wanted = [self._owners.get(p, mine) == mine for p in self.parameters]
        self._operand_offsets, self.numel = aligned_offsets([o.slot_numel for o in operands], _ALIGNMENT)
        self.partial: torch.Tensor | None = None
        """Sum of this supernode that waits for its reduction between supernodes, 1-D, `numel` elements."""
        self.is_in_flight = False
        """Whether `partial` is being reduced between supernodes: nothing may be added to it."""
        self.reduces_in_grad = all(p.master_dtype == dtype for p in self.parameters)
        """Whether `.grad` is a view of the flat buffer: the optimizer wants the dtype in which we sum."""
        self._flat: torch.Tensor | None = None
        self._flat_slots: list[torch.Tensor] = []
        self._stores: list[torch.Tensor] = []
        self._wrappers: list[DTensor] = []
        self._wrapper_references: list[int] = []
        self.flat_references = 0
        """Views of the flat buffer that this unit has made of its slice."""

    # ---- views ------------------------------------------------------------------------------------------------------

    def use_flat(self, flat: torch.Tensor) -> None:
        """Gives this unit its slice of the bucket's permanent buffer: 1-D, `numel` elements."""
        self._flat = flat
        self._flat_slots = self._slots(flat)

    def forget_flat(self) -> None:
        """Leaves the flat buffer to whoever else holds views of it."""
        self._flat, self._flat_slots, self.flat_references = None, [], 0
        if self.reduces_in_grad:
            self._stores, self._wrappers = [], []

    @property
    def wrappers_are_shared(self) -> bool:
        """Whether anyone but this object holds one of the DTensors that serve as `.grad`, none of which is one now."""
        return bool(self._wrappers) and self._count_wrapper_references() != self._wrapper_references

    def _count_wrapper_references(self) -> list[int]:
        counts = [sys.getrefcount(wrapper) for wrapper in self._wrappers]
        return counts + [sys.getrefcount(wrapper._local_tensor) for wrapper in self._wrappers]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(start, length) of what lies between the slots of this unit's buffer and is never written."""
        ends = [start + operand.slot_numel for start, operand in zip(self._operand_offsets, self.operands)]
        starts = [*self._operand_offsets[1:], self.numel]
        return [(end, start - end) for end, start in zip(ends, starts) if start > end]

    @property
    def flat(self) -> torch.Tensor:
        """What `use_flat` gave."""
        assert self._flat is not None
        return self._flat

    @property
    def flat_is_free(self) -> bool:
        """Whether the next sum may be formed in the flat buffer: it is `.grad`'s and no `.grad` exists."""
        return self.reduces_in_grad and all(p.sharded.grad is None for p in self.parameters)

    @property
    def sums_in_flat(self) -> bool:
        """Whether the partial sum lies in the flat buffer."""
        return self.partial is not None and self.partial is self._flat

    def slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """This rank's padded slot of each operand in a buffer of `numel` elements, 1-D."""
        return self._flat_slots if buffer is self._flat else self._slots(buffer)

    def _slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer.narrow(0, o, operand.slot_numel) for o, operand in zip(self._operand_offsets, self.operands)]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The shard-shaped gradient of each parameter in `buffer`, without padding."""
        views = []
        for start, operand in zip(self._operand_offsets, self.operands):
            for p, offset in zip(operand.parameters, operand.slot_offsets):
                slot = buffer.narrow(0, start + offset, p.slot.slot_numel)
                length = p.slot.length(p.info.shard_rank)
                views.append(slot.view(p.slot.slot_shape).narrow(p.slot.dim, 0, length))
        return views

    @property
    def has_owners(self) -> bool:
        """Whether one replica alone wants the gradient of some parameter."""
        return bool(self._owners)

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """What covers a sum of this unit, gaps apart: neighbours that the same replicas want are one."""
        found: list[Segment] = []
        for start, operand in zip(self._operand_offsets, self.operands):
            for p, offset in zip(operand.parameters, operand.slot_offsets):
                owner, first, length = self._owners.get(p), start + offset, p.slot.slot_numel
                if found and found[-1].owner == owner and found[-1].start + found[-1].length == first:
                    found[-1] = Segment(found[-1].start, found[-1].length + length, owner)
                else:
                    found.append(Segment(first, length, owner))
        return found

    # ---- delivering `.grad` -----------------------------------------------------------------------------------------

    def deliver(self, scale: float) -> None:
        """Multiplies the reduced partial sum by `scale` and adds it to every `.grad`. Consumes the partial sum."""
        reduced, self.partial = self.partial, None
        assert reduced is not None
        existing = [p.sharded.grad for p in self.parameters]
        wrappers = self._grad_wrappers()
        if reduced is self._flat and all(g is None for g in existing):
            if scale != 1.0:
                reduced.mul_(scale)
            for p, wrapper, is_wanted in zip(self.parameters, wrappers, self._is_wanted):
                p.sharded.grad = wrapper if is_wanted else None
            return
        if self._flat is not None and all(g is w for g, w in zip(existing, wrappers)):
            accumulate_scaled_(self._flat, reduced, scale)
            return
        for p, grad, view, store, wrapper, is_wanted in zip(
            self.parameters, existing, self._views(reduced), self._stores, wrappers, self._is_wanted
        ):
            if not is_wanted:
                continue
            if grad is not None:
                accumulate_scaled_(local_tensor(grad), view, scale)
                continue
            scale_copy_(store, view, scale)
            self._counters.copied_bytes += store.numel() * store.dtype.itemsize
            p.sharded.grad = wrapper

    def _grad_wrappers(self) -> list[DTensor]:
        """The DTensors that serve as `.grad`, built once: a construction costs as much as a small kernel."""
        if not self._wrappers:
            shared = self.flat if self.reduces_in_grad else None
            before = storage_references(shared)
            if shared is not None:
                self._stores = self._views(shared)
            else:
                self._stores = [torch.empty_like(p.local) for p in self.parameters]
            self._wrappers = [p.wrap(store) for p, store in zip(self.parameters, self._stores)]
            self.flat_references = storage_references(shared) - before
            self._wrapper_references = self._count_wrapper_references()
            self._counters.gradient_dtensors_built += len(self._wrappers)
        return self._wrappers


def storage_references(tensor: torch.Tensor | None) -> int:
    """How many tensors share the storage of `tensor`; 0 for None."""
    if tensor is None:
        return 0
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
