"""One sharded parameter: the shard and the full tensor that stand for it, and which of them the modules hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.slot import Slot
from hp_plugin.core.kernels import scale_copy_
from hp_plugin.core.transport import allow_gradient_owner, gradient_owner, set_gradient_owner
from hp_plugin.errors import ConfigurationError


@dataclass(frozen=True)
class MeshInfo:
    """A data-parallel mesh resolved once: the groups and coordinates that the engine needs in every step.

    Attributes:
        mesh: 1-D `(shard,)` or 2-D `(replicate, shard)`.
        shard_group: Ranks among which a parameter is split.
        shard_size: Size of `shard_group`.
        shard_rank: This rank's coordinate in it.
        replicate_group: Ranks that hold the same shard; None on a 1-D mesh or where there is one replica.
        replicate_size: Size of `replicate_group`, 1 where it is None.
        device: Device of the shards.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    device: torch.device

    @classmethod
    def resolve(cls, mesh: DeviceMesh) -> MeshInfo:
        """Reads groups and coordinates from `mesh`. Raises ConfigurationError unless it is 1-D or 2-D."""
        if mesh.ndim not in (1, 2):
            raise ConfigurationError(
                f"fully_shard got a {mesh.ndim}-D mesh with axes {mesh.mesh_dim_names}; it takes a 1-D mesh (shard) or "
                'a 2-D mesh (replicate, shard), for instance mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"]'
            )
        shard_axis = mesh.ndim - 1
        replicate_size = mesh.size(0) if mesh.ndim == 2 else 1
        index = None
        if mesh.device_type != "cpu":
            index = getattr(torch, mesh.device_type).current_device()
        return cls(
            mesh=mesh,
            shard_group=mesh.get_group(shard_axis),
            shard_size=mesh.size(shard_axis),
            shard_rank=mesh.get_local_rank(shard_axis),
            replicate_group=mesh.get_group(0) if replicate_size > 1 else None,
            replicate_size=replicate_size,
            device=torch.device(mesh.device_type, index) if index is not None else torch.device(mesh.device_type),
        )

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Placements of a parameter sharded on `dim`."""
        return (Shard(dim),) if self.mesh.ndim == 1 else (Replicate(), Shard(dim))

    @property
    def world_size(self) -> int:
        """Ranks over which gradients are reduced."""
        return self.shard_size * self.replicate_size


class ShardedParameter:
    """A parameter of a unit and the two tensors that stand for it.

    At rest the module holds `sharded`, a Parameter that is a DTensor over this rank's slice in the master dtype.
    While its unit is unsharded the module holds `full`, a plain Parameter in the compute dtype. `full` is one object
    with one address for life; resharding takes its storage away and unsharding puts it back, so what autograd saved in
    forward is whole again in backward. Its version counter does not see that.

    With one rank in the shard group and equal dtypes `full` aliases the shard and nothing moves.

    Args:
        parameter: The parameter as the module has it. Its custom attributes are kept on both tensors.
        owners: Every (module, name) that holds it; several when it is tied within the unit.
        info: The mesh.
        dim: The dim to shard.
        compute_dtype: Dtype of `full`.
        master_dtype: Dtype of the shard.
        name: Name for messages, relative to the unit's module.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        owners: list[tuple[nn.Module, str]],
        *,
        info: MeshInfo,
        dim: int,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        name: str,
    ) -> None:
        self.owners = owners
        self.info = info
        self.name = name
        self.slot = Slot(tuple(parameter.shape), dim, info.shard_size)
        self.placements = info.placements(dim)
        self.compute_dtype = compute_dtype
        self.master_dtype = master_dtype
        self.attributes = {k: v for k, v in vars(parameter).items() if not k.startswith("_hyperfsdp")}
        self.sharded = self._shard(parameter)
        if info.replicate_size > 1:
            allow_gradient_owner(self.sharded)
        self.unsharded_gradient: torch.Tensor | None = None
        """Gradient of the full parameter in the reduce dtype, summed over micro-batches that did not communicate."""
        self.full: nn.Parameter | None = None
        """What the modules hold while the unit is unsharded; exists from the first gather on."""
        self.full_is_shared = False
        """Whether the full tensor lies in memory that the ranks of the shard group share."""
        self._aliased_shard: torch.Tensor | None = None
        for module, attribute in owners:
            module._parameters[attribute] = self.sharded

    # ---- at rest ----------------------------------------------------------------------------------------------------

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        slot, rank = self.slot, self.info.shard_rank
        with torch.no_grad():
            piece = parameter.detach().narrow(slot.dim, slot.offset(rank), slot.length(rank))
            # A copy of its own even where the slice is contiguous: a view would keep the whole parameter alive.
            local = torch.empty_like(piece, dtype=self.master_dtype, memory_format=torch.contiguous_format)
            if not piece.is_meta:
                local.copy_(piece)
        sharded = nn.Parameter(self.wrap(local), requires_grad=parameter.requires_grad)
        _attach(sharded, self.attributes)
        return sharded

    def wrap(self, local: torch.Tensor) -> DTensor:
        """`local`, laid out as the shard of this parameter, as a DTensor. No communication."""
        stride = torch.empty(self.slot.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.info.mesh, self.placements, run_check=False, shape=torch.Size(self.slot.shape), stride=stride
        )

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard as a plain tensor in the master dtype, without padding. Free of autograd."""
        local = self.sharded._local_tensor  # type: ignore[attr-defined]  # read anew each time: `to_empty` swaps it inside the same Parameter
        assert isinstance(local, torch.Tensor)
        return local

    def adopt_replacement(self) -> None:
        """Takes over a Parameter that replaced the sharded one (`load_state_dict(assign=True)`).

        Raises:
            ConfigurationError: If the new one is not a DTensor of the same layout, dtype and device.
        """
        module, attribute = self.owners[0]
        current = module._parameters[attribute]
        if current is self.sharded or current is self.full:
            return
        if (
            not isinstance(current, DTensor)
            or tuple(current.placements) != self.placements
            or tuple(current.shape) != self.slot.shape
            or current.dtype != self.master_dtype
        ):
            raise ConfigurationError(
                f"parameter {self.name} was replaced after fully_shard by a {type(current).__name__} of "
                f"{getattr(current, 'dtype', None)} and shape {tuple(getattr(current, 'shape', ()))}; expected a "
                f"DTensor with placements {self.placements}, {self.master_dtype} and shape {self.slot.shape}. Change "
                "dtype and "
                "shape before fully_shard, or load with assign=False"
            )
        assert isinstance(current, nn.Parameter)
        if self.info.replicate_size > 1:
            allow_gradient_owner(current)
            set_gradient_owner(current, gradient_owner(self.sharded))
        self.sharded = current
        _attach(current, self.attributes)
        for owner, owner_attribute in self.owners:
            owner._parameters[owner_attribute] = current

    # ---- shard <-> full ---------------------------------------------------------------------------------------------

    @property
    def is_alias(self) -> bool:
        """Whether the full tensor is the shard itself: one rank in the shard group and equal dtypes."""
        return self.info.shard_size == 1 and self.compute_dtype == self.master_dtype

    def alias_full(self) -> None:
        """Makes the full tensor an alias of the shard, see `is_alias`."""
        local = self.local
        if self._aliased_shard is not local:
            self.bind_full(local.detach())
            self._aliased_shard = local

    def bind_full(self, tensor: torch.Tensor) -> None:
        """Makes `tensor`, of the full shape and the compute dtype, the memory of the full parameter."""
        self.full = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        _attach(self.full, self.attributes)

    @property
    def full_is_alive(self) -> bool:
        """Whether the full tensor holds memory of its own."""
        if self.full is None or self.is_alias or self.full_is_shared:
            return False
        return self.full.untyped_storage().size() > 0

    # ---- gradients --------------------------------------------------------------------------------------------------

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient that autograd left on the full parameter, which loses it."""
        if self.full is None or self.full.grad is None:
            return None
        gradient, self.full.grad = self.full.grad, None
        return gradient

    @property
    def has_gradient(self) -> bool:
        """Whether autograd left a gradient on the full parameter."""
        return self.full is not None and self.full.grad is not None

    def is_operand(self, gradient: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether `gradient` in memory is what `reduction_operand` would write in `dtype`: the slots of all ranks."""
        slot = self.slot
        return slot.is_row_major and slot.is_even and gradient.dtype == dtype and gradient.is_contiguous()

    def reduction_operand(
        self,
        gradient: torch.Tensor | None,
        dtype: torch.dtype,
        counters: Counters,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`gradient` of the full parameter as the input of its reduce-scatter: contiguous, 1-D, padded, in `dtype`.

        It is the gradient itself where `is_operand` says so and `out` is None, else one copy, in `out` where it is
        given. None stands for zeros.
        """
        slot = self.slot
        if gradient is None:
            if out is not None:
                return out.zero_()
            return torch.zeros(slot.padded_numel, dtype=dtype, device=self.info.device)
        if out is None and self.is_operand(gradient, dtype):
            return gradient.detach().view(-1)
        operand = torch.empty(slot.padded_numel, dtype=dtype, device=self.info.device) if out is None else out
        counters.copied_bytes += slot.numel * dtype.itemsize
        if slot.is_row_major:
            scale_copy_(operand.narrow(0, 0, slot.numel).view(slot.shape), gradient.detach(), 1.0)
            operand.narrow(0, slot.numel, slot.padded_numel - slot.numel).zero_()
            return operand
        if not slot.is_even:
            operand.zero_()
        slots = operand.view(slot.group_size, *slot.slot_shape)
        for rank in range(slot.group_size):
            length = slot.length(rank)
            piece = gradient.detach().narrow(slot.dim, slot.offset(rank), length)
            slots[rank].narrow(slot.dim, 0, length).copy_(piece)
        return operand


Place = tuple[nn.Module, str, ShardedParameter]
"""A module, the name of a parameter in it, and that parameter."""


def install_fulls(places: Iterable[Place]) -> None:
    """Puts full parameters into the modules."""
    for module, attribute, parameter in places:
        full = parameter.full
        assert full is not None
        if full.requires_grad != parameter.sharded.requires_grad:
            full.requires_grad_(parameter.sharded.requires_grad)
        # Straight into the dict: nn.Module.__setattr__ costs several microseconds a parameter and checks nothing we
        # need.
        module._parameters[attribute] = full


def install_shards(places: Iterable[Place]) -> None:
    """Puts shards back into the modules."""
    for module, attribute, parameter in places:
        module._parameters[attribute] = parameter.sharded


def _attach(parameter: torch.Tensor, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        setattr(parameter, key, value)


def find_owners(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every parameter held directly by one of `modules`, with all its holders, in order of appearance."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, attribute))
    return owners
