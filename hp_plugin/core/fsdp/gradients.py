"""The sharded gradients of a unit: one flat buffer that is reduce-scatter output, inter-supernode operand and `.grad`.

Three buffers, one rule each:

* `flat`, permanent. When no parameter of the unit has a gradient, the reduction runs in it and `.grad` becomes a view
of
  it. Nothing is copied.
* `partial`. Sum of micro-batches that are reduced inside the supernode but not yet between supernodes. It is `flat`
where
  that is free, else a buffer of its own: what `.grad` already holds is reduced and scaled and must be neither reduced
  nor scaled again.
* scratch. Output of the reduce-scatter when a `partial` exists, added to it at once and dropped.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.parameter import ShardedParameter
from hp_plugin.core.fsdp.slot import aligned_offsets
from hp_plugin.core.kernels import accumulate_scaled_, scale_copy_
from hp_plugin.core.layout import local_tensor

_ALIGNMENT = 32
"""Elements. Slots start at multiples of 64 bytes in every floating dtype of two bytes or more."""


class UnitGradients:
    """Gradient storage of the parameters of one unit that require a gradient.

    Args:
        parameters: Those parameters, in the order of their slots. Fixed for the life of this object.
        dtype: Reduce dtype.
        device: Device of the buffers.
        counters: Where copies and DTensor constructions are counted.
    """

    def __init__(
        self, parameters: list[ShardedParameter], dtype: torch.dtype, device: torch.device, counters: Counters
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype
        self._device = device
        self._counters = counters
        self._offsets, self._numel = aligned_offsets([p.slot.slot_numel for p in parameters], _ALIGNMENT)
        self._flat: torch.Tensor | None = None
        self._stores: list[torch.Tensor] = []
        self._wrappers: list[DTensor] = []
        self.partial: torch.Tensor | None = None

    # ---- choosing a buffer ------------------------------------------------------------------------------------------

    def target(self) -> torch.Tensor:
        """The buffer that the next reduce-scatter must write."""
        if self.partial is not None:
            return self._new_buffer()
        if not self._is_alias or all(p.sharded.grad is None for p in self.parameters):
            return self.flat
        return self._new_buffer()

    def accumulate(self, scattered: torch.Tensor) -> torch.Tensor:
        """Adds the output of a reduce-scatter to the partial sum and returns the partial sum."""
        if self.partial is None:
            self.partial = scattered
        elif self.partial is not scattered:
            accumulate_scaled_(self.partial, scattered, 1.0)
        return self.partial

    @property
    def flat(self) -> torch.Tensor:
        """The permanent buffer, 1-D, in the reduce dtype; gaps between slots are zero."""
        if self._flat is None:
            self._flat = self._new_buffer()
        return self._flat

    def _new_buffer(self) -> torch.Tensor:
        # Zeros: the gaps between slots travel with the inter-supernode reduction and must not grow into inf or nan.
        return torch.zeros(self._numel, dtype=self.dtype, device=self._device)

    def slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The padded slot of each parameter in `buffer`, 1-D."""
        return [buffer.narrow(0, o, p.slot.slot_numel) for o, p in zip(self._offsets, self.parameters)]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The shard-shaped gradient of each parameter in `buffer`, without padding."""
        views = []
        for slot, p in zip(self.slots(buffer), self.parameters):
            length = p.slot.length(p.info.shard_rank)
            views.append(slot.view(p.slot.slot_shape).narrow(p.slot.dim, 0, length))
        return views

    # ---- delivering `.grad` -----------------------------------------------------------------------------------------

    @property
    def _is_alias(self) -> bool:
        """Whether `.grad` is a view of `flat`: the optimizer wants the dtype in which we reduce."""
        return all(p.master_dtype == self.dtype for p in self.parameters)

    def deliver(self, scale: float) -> None:
        """Multiplies the reduced partial sum by `scale` and adds it to every `.grad`. Consumes the partial sum."""
        reduced, self.partial = self.partial, None
        assert reduced is not None
        existing = [p.sharded.grad for p in self.parameters]
        if reduced is self._flat and all(g is None for g in existing):
            if scale != 1.0:
                reduced.mul_(scale)
            self._hand_out(copy_from_flat=not self._is_alias)
            return
        if self._is_alias and self._wrappers and all(g is w for g, w in zip(existing, self._wrappers)):
            accumulate_scaled_(self.flat, reduced, scale)
            return
        wrappers = self._grad_wrappers()
        for p, grad, view, store, wrapper in zip(
            self.parameters, existing, self._views(reduced), self._stores, wrappers
        ):
            if grad is not None:
                accumulate_scaled_(local_tensor(grad), view, scale)
                continue
            scale_copy_(store, view, scale)
            p.sharded.grad = wrapper

    def _hand_out(self, *, copy_from_flat: bool) -> None:
        wrappers = self._grad_wrappers()
        if copy_from_flat:
            for view, store in zip(self._views(self.flat), self._stores):
                store.copy_(view)
                self._counters.copied_bytes += store.numel() * store.dtype.itemsize
        for p, wrapper in zip(self.parameters, wrappers):
            p.sharded.grad = wrapper

    def _grad_wrappers(self) -> list[DTensor]:
        """The DTensors that serve as `.grad`, built once: a construction costs as much as a small kernel."""
        if not self._wrappers:
            if self._is_alias:
                self._stores = self._views(self.flat)
            else:
                self._stores = [torch.empty_like(p.local) for p in self.parameters]
            self._wrappers = [p.wrap(store) for p, store in zip(self.parameters, self._stores)]
            self._counters.gradient_dtensors_built += len(self._wrappers)
        return self._wrappers
