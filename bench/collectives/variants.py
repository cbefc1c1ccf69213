"""What is compared: collectives of one unit with one parameter, through each transport's own objects.

Every variant starts from what a training step has, a private shard and a private gradient, and leaves the whole
parameter and this rank's slice of the sum where the next layer or the optimizer reads them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hp_plugin
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.transport import C10dTransport
from hp_plugin.core.transport.shm import GradientRing, RingSlots

SHM, C10D, GLOO = "ours_shm", "ours_c10d", "gloo"
SUM = "ours_shm_sum"
"""The reduce-scatter of shared memory where gradients lie in it already."""

_MORE_THAN_SLOTS = 8
"""A ring has fewer places for entries of one size."""


class Variant(abc.ABC):
    """Collectives of one operand of `numel` fp32 elements.

    Attributes:
        shard: This rank's slice of the parameter, `numel / ranks` elements: the input of the all-gather.
        gradient: `numel` elements: the input of the reduce-scatter.
        gathered: The result of the all-gather, `numel` elements.
        reduced: That of the reduce-scatter, `numel / ranks` elements.
    """

    gathered: torch.Tensor

    def __init__(self, numel: int, ranks: int) -> None:
        self.shard = torch.zeros(numel // ranks)
        self.gradient = torch.zeros(numel)
        self.reduced = torch.zeros(numel // ranks)

    @abc.abstractmethod
    def all_gather(self) -> None:
        """Every rank must call. Leaves the whole in `gathered`."""

    @abc.abstractmethod
    def reduce_scatter(self) -> None:
        """Every rank must call. Leaves the sum in `reduced`."""


class Gloo(Variant):
    """gloo, as torch.distributed calls it."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        super().__init__(numel, group.size())
        self._group = group
        self.gathered = torch.zeros(numel)
        # Newer torch has other names for them, and warns of these.
        self._gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self) -> None:
        """`all_gather_into_tensor`."""
        self._gather(self.gathered, self.shard, group=self._group)

    def reduce_scatter(self) -> None:
        """`reduce_scatter_tensor`."""
        self._reduce(self.reduced, self.gradient, group=self._group)


class OursC10d(Variant):
    """Our c10d transport, on gloo messages between ranks."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        super().__init__(numel, group.size())
        self._transport = C10dTransport(group)
        self.gathered = torch.zeros(numel)

    def all_gather(self) -> None:
        """As the engine issues it: on the lane of the group."""
        self._transport.all_gather(lambda: ([self.gathered], [self.shard])).wait()

    def reduce_scatter(self) -> None:
        """As the engine issues it, but on this thread."""
        self._transport.reduce_scatter([self.reduced], [self.gradient]).wait()


class _Layer(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[0]


class OursShm(Variant):
    """Our shared memory: the objects that `fully_shard` makes for a unit inside a root."""

    def __init__(self, numel: int, mesh: DeviceMesh) -> None:
        super().__init__(numel, int(mesh.size()))
        model = nn.Sequential(_Layer(numel))
        for module in (model[0], model):
            hp_plugin.fully_shard(module, mesh=mesh, transport="shm")
        model.fsdp_counters()  # type: ignore[operator]  # connects the units to a root where no forward has done so
        unit = unit_of(model[0])
        assert unit is not None
        self._unit, self._root = unit, unit.root
        self._root.connect()
        self._model = model
        (self._parameter,) = unit.parameters
        self.shard = self._parameter.local
        assert self._parameter.full is not None
        self.gathered = self._parameter.full.detach()
        gradients = unit.plan_gradients()
        assert gradients is not None
        self._gradients = gradients

    def all_gather(self) -> None:
        """Publishes the shard and waits for those of the others; the use ends at once."""
        fulls = self._unit._fulls
        fulls.begin(self._root, for_backward=False)
        fulls.wait(self._root)
        fulls.release(self._root, keep=None)

    def reduce_scatter(self) -> None:
        """Copies what the peers need of the gradient into the ring, and adds up."""
        (operand,) = self._gradients.operands
        entry = self._place()
        own = operand.write_for_peers([self.gradient], torch.float32, self._root.counters, out=entry.operands[0])
        self._ring.reduce_scatter(entry, [self.reduced], own=[own]).wait()

    def fill_slots(self) -> None:
        """Copies the whole gradient to wherever `sum_of_slots` will find one."""
        (operand,) = self._gradients.operands
        for _ in range(_MORE_THAN_SLOTS):
            entry = self._place()
            operand.reduction_operand([self.gradient], torch.float32, self._root.counters, out=entry.operands[0])
            self._ring.reduce_scatter(entry, [self.reduced]).wait()

    def sum_of_slots(self) -> None:
        """As `reduce_scatter`, of a gradient that lies in the ring."""
        self._ring.reduce_scatter(self._place(), [self.reduced]).wait()

    def _place(self) -> RingSlots:
        ring, unit = self._ring, self._unit
        (operand,) = self._gradients.operands
        entry, must_be_done = ring.place(unit._index, [operand.slot_numel * unit.info.shard_size], torch.float32)
        ring.wait_until_free(must_be_done, unit._index)
        return entry

    @property
    def _ring(self) -> GradientRing:
        ring = self._unit._ring
        assert ring is not None
        return ring
