"""From the model that a job passes to `deepspeed.initialize` to sharded units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.fsdp import MixedPrecisionPolicy, fully_shard
from hp_plugin.core.fsdp.experts import expert_modules, expert_reshard
from hp_plugin.deepspeed.experts import ExpertGroup, Experts
from hp_plugin.deepspeed.replacements import Replacements
from hp_plugin.deepspeed.schema import HyperFSDPConfig
from hp_plugin.errors import ConfigurationError
from hp_plugin.host.words import did_you_mean

_NO_EXPERTS = Experts()


def shard_model(
    model: nn.Module,
    options: HyperFSDPConfig,
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    experts: Experts = _NO_EXPERTS,
) -> Replacements:
    """Shards `model` in place, one unit after the other; every rank of the mesh must call.

    Parameters built under `deepspeed.zero.Init` are gathered one unit at a time, so that no rank ever holds more than
    one unit in full.

    Args:
        model: On the device of the mesh, with equal weights on all ranks, or built under `zero.Init`.
        options: Our block.
        mesh: `("dp_replicate", "dp_shard")`.
        policy: Dtypes of all units.
        experts: Of the model, with the meshes of their parameters.

    Returns:
        What stands for each parameter now.
    """
    replacements = Replacements()
    settings: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=policy,
        transport=options.transport,
        optimizer_sharding=options.optimizer_sharding,
        bucket_bytes=options.bucket_bytes,
        window=options.window,
        prefetch=options.prefetch,
        deterministic=options.deterministic,
    )
    taken: set[nn.Module] = set()
    full_dtype = torch.float32 if policy.param_dtype is None else None
    reshard = options.reshard_after_forward
    units = unit_modules(model, options.units)
    roots = expert_modules(model)
    inside = {module for root in roots for module in root.modules()}
    # Units that were asked for by name may lie inside the experts; else all experts of a layer are one unit.
    asked = [] if options.units == "auto" else [unit for unit in units if unit in inside]
    for unit in [*asked, *(root for root in roots if root not in asked)]:
        group = _group_of(unit, experts)
        _shard_unit(
            unit,
            taken,
            replacements,
            full_dtype,
            reshard_after_forward=expert_reshard(reshard, group.mesh.size(-1)),
            **{**settings, "mesh": group.mesh},
        )
    for unit in units:
        if unit not in inside:
            _shard_unit(unit, taken, replacements, full_dtype, reshard_after_forward=reshard, **settings)
    _shard_unit(model, taken, replacements, full_dtype, **settings)
    if roots:
        # An expert sees the tokens of all data-parallel ranks, so its gradient is a mean over as many ranks as all
        # others, though it is added up over fewer.
        root_module: Any = model
        root_module.set_gradient_divide_factor(float(mesh.size()))
    return replacements


def _group_of(unit: nn.Module, experts: Experts) -> ExpertGroup:
    group = experts.group_of(next(unit.parameters()))
    assert group is not None  # `expert_modules` has looked
    return group


def unit_modules(model: nn.Module, classes: str | Sequence[str]) -> list[nn.Module]:
    """The modules inside `model` that become units of their own, in order of `modules()`.

    Args:
        model: Any module.
        classes: "auto": the members of every outermost ModuleList and of every Sequential that is not inside one, as
            far as they have parameters and a forward of their own. Otherwise names of module classes.

    A module whose parameters are tied to one outside it is left to the root, which gathers both together.

    Raises:
        ConfigurationError: No module has a class of one of the names.
    """
    if isinstance(classes, str):
        found = list(_members(model))
    else:
        found = []
        known = {type(module).__name__ for module in model.modules()}
        for name in classes:
            if name not in known:
                raise ConfigurationError(
                    f'"hyperfsdp.units" names the class {name}, of which the model has no module'
                    f"{did_you_mean(name, sorted(known))}"
                )
        found = [module for module in model.modules() if type(module).__name__ in classes and module is not model]
        depth = {module: name.count(".") for name, module in model.named_modules()}
        found.sort(key=lambda module: -depth[module])  # bottom-up: units may lie inside one another
    holders = _holders(model)
    return [module for module in found if _is_closed(module, holders)]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and _has_forward(child)
        if not is_member:
            yield from _members(child)
        elif any(True for _ in child.parameters()):
            yield child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    return holders


def _is_closed(module: nn.Module, holders: dict[int, list[nn.Module]]) -> bool:
    inside = set(module.modules())
    return all(holder in inside for parameter in module.parameters() for holder in holders[id(parameter)])


def _shard_unit(
    module: nn.Module,
    taken: set[nn.Module],
    replacements: Replacements,
    full_dtype: torch.dtype | None,
    **settings: Any,
) -> None:
    managed = list(_managed(module, taken))
    _gather_partitioned(managed, replacements, full_dtype)
    before = [
        (inner, name, parameter)
        for inner in managed
        for name, parameter in inner._parameters.items()
        if parameter is not None
    ]
    fully_shard(module, **settings)
    taken.add(module)
    for inner, name, parameter in before:
        sharded = inner._parameters[name]
        assert sharded is not None
        replacements.record(parameter, sharded)
        if sharded is not parameter:
            _free(parameter)


def _managed(module: nn.Module, taken: set[nn.Module]) -> Iterator[nn.Module]:
    """`module` and what is inside it, down to, not including, units that exist."""
    seen: set[nn.Module] = set()
    pending = [module]
    while pending:
        found = pending.pop()
        if found in seen or (found in taken and found is not module):
            continue
        seen.add(found)
        yield found
        pending.extend(reversed(list(found.children())))


@torch.no_grad()
def _gather_partitioned(
    modules: Iterable[nn.Module], replacements: Replacements, full_dtype: torch.dtype | None
) -> None:
    """Puts plain, full parameters in the place of those that `zero.Init` has partitioned."""
    places = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and hasattr(parameter, "ds_id")
    ]
    if not places:
        return
    partitioned = list({id(parameter): parameter for _, _, parameter in places}.values())
    with deepspeed.zero.GatheredParameters(partitioned):
        for parameter in partitioned:
            data = parameter.data.detach()
            plain = nn.Parameter(data.to(full_dtype or data.dtype, copy=True), requires_grad=parameter.requires_grad)
            vars(plain).update(_own_attributes(parameter))
            replacements.record(parameter, plain)
    for module, name, parameter in places:
        replacement = replacements.follow(parameter)
        assert isinstance(replacement, nn.Parameter)
        module._parameters[name] = replacement
    for parameter in partitioned:
        partition: torch.Tensor = vars(parameter)["ds_tensor"]
        partition.data = torch.empty(0, dtype=partition.dtype, device=partition.device)


def _own_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What a job has attached to a parameter, without what `zero.Init` has."""
    return {
        key: value
        for key, value in vars(parameter).items()
        if not key.startswith(("ds_", "_ds", "_z3", "_orig")) and not callable(value)
    }


def _free(parameter: torch.Tensor) -> None:
    """Gives up the memory of a full parameter that shards stand for; the object may still be referred to."""
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
