"""`fully_shard`: makes one unit out of a module's parameters and hooks it into forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hp_plugin.core.fsdp.hooks import UnitHooks
from hp_plugin.core.fsdp.kept import normalized_reshard
from hp_plugin.core.fsdp.module import install_unit
from hp_plugin.core.fsdp.options import RootOptions
from hp_plugin.core.fsdp.parameter import MeshInfo, ShardedParameter, find_owners
from hp_plugin.core.fsdp.policies import MixedPrecisionPolicy, OffloadPolicy, refuse_offload
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.fsdp.unit import Unit
from hp_plugin.core.topology import build_mesh
from hp_plugin.errors import ConfigurationError, UnsupportedError

ModulesT = TypeVar("ModulesT", nn.Module, list[nn.Module])


def fully_shard(
    module: ModulesT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | torch_fsdp.MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | torch_fsdp.OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    transport: Literal["auto", "c10d", "shm", "symm_mem"] = "auto",
    mode: Literal["production", "validation"] = "production",
    optimizer_sharding: Literal["auto", "shard", "shard_replicate"] = "auto",
    bucket_bytes: int | None = None,
    window: int | None = None,
    prefetch: int | None = None,
    deterministic: bool = False,
    residence: Literal["private", "aliased"] = "private",
) -> ModulesT:
    """Shards the parameters of `module` over the fast tier of a mesh and keeps them in step over the slow one.

    Call it bottom-up, as torch FSDP2's: first on every block, then on the model. Each call makes one *unit* of the
    parameters that no earlier call took. A unit is gathered as a whole before its module's forward and backward and
    released after; its gradients are reduced as a whole. Parameters become DTensors at rest, under their old names and
    with their custom attributes; the module stays the same object. Weights are taken as they are: every rank must have
    initialised them alike.

    Every rank of the mesh must call, in the same order.

    Args:
        module: A module, or a list of modules whose forwards run as one unit.
        mesh: 1-D: parameters are sharded over it. 2-D: replicated over axis 0, which runs between supernodes, and
            sharded over axis 1, inside one. None: all ranks, with the supernodes found by `Topology.detect`.
        reshard_after_forward: Release full parameters between forward and backward. None: True, except in the root. A
            number N that divides the shard group: between forward and backward they stay sharded over groups of N
            consecutive ranks, in the compute dtype, and backward gathers inside these. 1 is False, the size of the
            shard group is True.
        shard_placement_fn: Which dim of a parameter to shard: `Shard(dim)`, or None for dim 0.
        mp_policy: Dtypes.
        offload_policy: Only the default, which offloads nothing.
        ignored_params: Parameters to leave alone.
        transport: How bytes move inside a supernode: "c10d", collectives of the process group, or "shm", memory that
            processes of one host share. "auto": shm on CPU where the shard group is on one host and the native library
            is there, else c10d; the environment variable HP_TRANSPORT overrides it. Holds for everything under a root.
        mode: "production" is the only one built.
        optimizer_sharding: What is sharded of the optimizer's state. "auto" is "shard" for now, the only one built.
        bucket_bytes: Bytes of sharded gradient per message between supernodes: units are put into buckets in reverse
            order of `modules()` until one holds as many. 1: one message per unit. None: chosen from the latency and
            bandwidth of the link. Like the two below it holds for everything under one root: units that name it must
            agree.
        window: How many gradient buckets may wait for the slow link beside `.grad`. When all are taken, backward
            waits. None: 2.
        prefetch: How many bytes of full parameters may be gathered ahead of their use. At least one unit is, unless it
            is 0: then none. None: as many as the largest unit inside the root has.
        deterministic: The same run gives the same bits every time and on every transport: sums inside a supernode are
            formed in rank order, and `bucket_bytes` does not follow the measured link. Holds for everything under a
            root.

        residence: Where this unit's shards live when ranks share memory. "private": in memory of the rank, from where
            they are written into the shared parameters before each forward. "aliased": a shard is the slice of the
            shared parameter, which saves that copy and its memory; it needs one dtype for both, shards on dim 0, and
            HyperAdamW. Refused where memory is not shared, unless the shard group has one rank.

    Returns:
        `module`, which is an `FSDPModule` from now on.

    Raises:
        UnsupportedError: For an option that is not built yet, a parameter that is a DTensor already, a parameter tied
            across units, or a scalar parameter.
        ConfigurationError: For a mesh that is neither 1-D nor 2-D, a module sharded twice, a dim that does not exist,
            or a number out of range.
    """
    _refuse_unbuilt(transport, mode, optimizer_sharding, residence)
    options = RootOptions(
        bucket_bytes=bucket_bytes,
        window=window,
        prefetch=prefetch,
        transport=None if transport == "auto" else transport,
        deterministic=deterministic or None,
    )
    refuse_offload(offload_policy)
    policy = MixedPrecisionPolicy.adopt(mp_policy)
    modules: list[nn.Module] = list(module) if isinstance(module, list) else [module]
    _check_modules(modules)
    info = MeshInfo.resolve(build_mesh()["dp_replicate", "dp_shard"] if mesh is None else mesh)
    reshard = normalized_reshard(reshard_after_forward, info.shard_size)
    managed = _managed_modules(modules)
    ignored = ignored_params or set()
    names = _names(modules)
    parameters = []
    for parameter, owners in find_owners(managed).items():
        if parameter in ignored:
            continue
        name = names[owners[0]]
        _check_parameter(parameter, name)
        dim = _shard_dim(parameter, name, shard_placement_fn)
        parameters.append(_sharded(parameter, owners, info, dim, policy, name))
        parameter._hyperfsdp_name = name  # type: ignore[attr-defined]  # marks it as taken, see _check_parameter
    unit = Unit(
        modules,
        parameters,
        info=info,
        policy=policy,
        options=options,
        reshard_after_forward=reshard,
        residence=residence,
    )
    for each in modules:
        install_unit(each, unit)
    UnitHooks(unit).register()
    return module


def _refuse_unbuilt(transport: str, mode: str, optimizer_sharding: str, residence: str) -> None:
    choices = (
        ("transport", transport, ("auto", "c10d", "shm"), ("symm_mem",)),
        ("mode", mode, ("production",), ("validation",)),
        ("residence", residence, ("private", "aliased"), ()),
        ("optimizer_sharding", optimizer_sharding, ("auto", "shard"), ("shard_replicate",)),
    )
    for option, value, built, planned in choices:
        if value in built:
            continue
        if value in planned:
            raise UnsupportedError(f'{option}="{value}" is not supported yet; use {option}="{built[0]}"')
        raise ConfigurationError(f'{option}="{value}" is unknown; expected one of {", ".join((*built, *planned))}')


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigurationError("fully_shard got an empty list of modules")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ConfigurationError(
                f"fully_shard got a {type(module).__name__}, which has no forward to hook; shard its members, or the "
                "module that holds it"
            )
        if unit_of(module) is not None:
            raise ConfigurationError(f"fully_shard has been called on this {type(module).__name__} before")


def _managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules and everything inside them down to, not including, modules that have a unit of their own."""
    managed: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen or unit_of(module) is not None:
            return
        seen.add(module)
        managed.append(module)
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return managed


def _names(modules: Sequence[nn.Module]) -> dict[tuple[nn.Module, str], str]:
    names: dict[tuple[nn.Module, str], str] = {}
    for top in modules:
        for prefix, module in top.named_modules():
            for attribute in module._parameters:
                names.setdefault((module, attribute), f"{prefix}.{attribute}" if prefix else attribute)
    return names


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    taken = getattr(parameter, "_hyperfsdp_name", None)
    if taken is not None:
        raise UnsupportedError(
            f"parameter {name} is tied to {taken}, which another unit manages already; put both modules into one "
            "unit, by calling fully_shard only on a module that contains both or on a list of both"
        )
    if isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"parameter {name} is a DTensor with placements {tuple(parameter.placements)}; sharding what tensor "
            "parallelism has sharded as DTensor is not supported yet. Megatron's tensor parallelism, on plain "
            "tensors, is"
        )
    if parameter.ndim == 0 or parameter.numel() == 0:
        raise UnsupportedError(
            f"parameter {name} has shape {tuple(parameter.shape)}; fully_shard needs at least one element in at "
            "least one dim. Make a scalar a tensor of shape (1,), or pass the parameter in ignored_params"
        )
    if not parameter.is_floating_point():
        raise UnsupportedError(
            f"parameter {name} has dtype {parameter.dtype}; fully_shard takes floating dtypes. Pass it in "
            "ignored_params"
        )


def _shard_dim(
    parameter: nn.Parameter, name: str, shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
) -> int:
    placement = shard_placement_fn(parameter) if shard_placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ConfigurationError(
            f"shard_placement_fn gave {placement!r} for parameter {name}; expected Shard(dim) or None"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise ConfigurationError(
            f"shard_placement_fn gave {placement!r} for parameter {name}, which has {parameter.ndim} dims"
        )
    return dim


def _sharded(
    parameter: nn.Parameter,
    owners: list[tuple[nn.Module, str]],
    info: MeshInfo,
    dim: int,
    policy: MixedPrecisionPolicy,
    name: str,
) -> ShardedParameter:
    if not parameter.is_meta and parameter.device.type != info.device.type:
        with torch.no_grad():
            moved = nn.Parameter(parameter.to(info.device), requires_grad=parameter.requires_grad)
        moved.__dict__.update(vars(parameter))
        parameter = moved
    master_dtype = policy.master_dtype or parameter.dtype
    return ShardedParameter(
        parameter,
        owners,
        info=info,
        dim=dim,
        compute_dtype=policy.param_dtype or parameter.dtype,
        master_dtype=master_dtype,
        name=name,
    )
