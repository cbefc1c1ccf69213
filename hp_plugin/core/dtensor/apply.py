"""`apply_plan`: turns a model into one rank's part of it, once; afterwards only the boundaries' steps run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.dtensor.applied import AppliedPlan, applied_plan
from hp_plugin.core.dtensor.boundary import Boundary, compile_steps, input_positions, install, output_key
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.collectives import AxisGroup, mean_step
from hp_plugin.core.dtensor.dispatch import Dispatch, count_experts, expert_lists, keep_own
from hp_plugin.core.dtensor.loss import causal_lm_loss, loss_axis
from hp_plugin.core.dtensor.plan import ModuleSpec, ShardingPlan, placement_on
from hp_plugin.core.layout import AttachedLayout, attach_layout, attached_layout
from hp_plugin.errors import ConfigurationError, UnsupportedError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def apply_plan(
    model: ModuleT,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    *,
    mode: Literal["production", "validation"] = "production",
) -> ModuleT:
    """Makes `model` this rank's part of it: plain local parameters, and collectives at the boundaries that need them.

    Afterwards no DTensor is made and nothing is dispatched. Weights are taken as they are, so every rank must have
    initialised the whole model alike. Shard what is left over data-parallel axes by calling `fully_shard` afterwards,
    with `mesh["dp_shard"]` or `mesh["dp_replicate", "dp_shard"]`. Make optimizers afterwards: parameters are new
    objects.

    Every rank of the mesh must call.

    Args:
        model: the whole model, on any device, `meta` included.
        plan: checked against the model first; see `check_plan` for what is refused.
        mesh: must have every axis of the plan, with as many ranks. It may have more axes.
        mode: "production", or "validation": every forward is compared with one of the whole model, operation by
            operation, and stops at the first fault; see `docs/validation.md`. Costs memory and time.

    Returns:
        `model`, changed in place. Each parameter has its `Layout` attached (`hp_plugin.core.layout.attached_layout`).

    Raises:
        ConfigurationError: mesh and plan differ, the plan does not fit the model, or one has been applied before.
        UnsupportedError: for a model that is sharded already.
    """
    if mode == "validation":
        from hp_plugin.core.dtensor.validation.live import apply_for_validation  # which applies plans itself

        return cast(ModuleT, apply_for_validation(model, plan, mesh))
    if mode != "production":
        raise ConfigurationError(f'mode="{mode}" is unknown; expected "production" or "validation".')
    if applied_plan(model) is not None:
        raise ConfigurationError("a plan has been applied to this model before; apply one to a fresh model.")
    check_plan(model, plan)
    applied = AppliedPlan(plan, _lines(plan, mesh), {}, ranks=_ranks(plan, mesh))
    modules = dict(model.named_modules(remove_duplicate=False))
    dispatches = _dispatches(modules, applied)
    applied = replace(applied, layouts=_make_local(model, applied))
    _divide_counts(modules, applied)
    for name, boundary in _boundaries(modules, applied, dispatches).items():
        install(modules[name], boundary)
    applied = _keep_own_experts(model, modules, applied)
    model._hp_applied_plan = applied  # type: ignore[assignment]
    _replace_loss(model, applied)
    return model


def _replace_loss(model: nn.Module, applied: AppliedPlan) -> None:
    """A model of transformers that computes its loss gets the one for divided logits."""
    axis = loss_axis(applied.plan)
    loss = getattr(model, "loss_function", None)
    if axis is None or loss is None or applied.lines[axis].size == 1:
        return
    name = getattr(loss, "__name__", repr(loss))
    if name != "ForCausalLMLoss":
        raise UnsupportedError(
            f"the model computes its loss by {name}, which needs whole logits; plan without loss_parallel."
        )
    model.loss_function = causal_lm_loss(applied.lines[axis])  # type: ignore[assignment]


def _lines(plan: ShardingPlan, mesh: DeviceMesh) -> dict[str, AxisGroup]:
    names = mesh.mesh_dim_names or ()
    for axis, size in plan.axes.items():
        if axis not in names:
            raise ConfigurationError(f"the plan is for axis {axis!r}, but the mesh has the axes {names}.")
        found = mesh.size(names.index(axis))
        if found != size:
            raise ConfigurationError(f"the plan is for {size} ranks on axis {axis}, but the mesh has {found}.")
    if [axis for axis in names if axis in plan.axes] != list(plan.axes):
        raise ConfigurationError(
            f"the plan has the axes {', '.join(plan.axes)} in another order than the mesh, {', '.join(names)}; where "
            "several divide one dim the order matters, so use the same."
        )
    return {
        axis: AxisGroup(axis, mesh.get_group(axis), plan.axes[axis], mesh.get_local_rank(axis))
        for axis in names
        if axis in plan.axes
    }


def _ranks(plan: ShardingPlan, mesh: DeviceMesh) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The global ranks of the mesh that `mesh` is a part of, if it is one, and where the plan's axes are in it."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _mesh_resources().get_root_mesh(mesh)
    names = root.mesh_dim_names or ()
    if not set(plan.axes) <= set(names):  # an axis that was made of several
        root, names = mesh, mesh.mesh_dim_names or ()
    return root.mesh, tuple(names.index(axis) for axis in plan.axes)


def _mesh_resources() -> Any:
    """Where older releases of torch keep which mesh is a part of which."""
    from torch.distributed.device_mesh import _mesh_resources as found

    return found


def _dispatches(modules: Mapping[str, nn.Module], applied: AppliedPlan) -> dict[str, Dispatch]:
    """How tokens reach experts, by module name, where an axis of several ranks divides them."""
    return {
        name: Dispatch(applied.lines[spec.dispatch], count_experts(name, modules[name]), name)
        for name, spec in applied.plan.modules.items()
        if spec.dispatch is not None and applied.lines[spec.dispatch].size > 1
    }


def _keep_own_experts(model: nn.Module, modules: Mapping[str, nn.Module], applied: AppliedPlan) -> AppliedPlan:
    """Drops experts that are modules of other ranks. What is kept is numbered from 0; `whole_names` says what it was.

    Boundaries are installed by then: of these experts too, by the names that the plan has for them.
    """
    moved: dict[str, str] = {}
    for name, spec in applied.plan.modules.items():
        if spec.dispatch is None or applied.lines[spec.dispatch].size == 1:
            continue
        line = applied.lines[spec.dispatch]
        for full, experts in expert_lists(name, modules[name]).items():
            first = keep_own(experts, line)
            moved |= {f"{full}.{number}.": f"{full}.{first + number}." for number in range(len(experts))}
            for parameter in experts.parameters():
                attached = attached_layout(parameter)
                assert attached is not None
                attach_layout(parameter, replace(attached, apart=(line.group,)))
    if not moved:
        return applied
    names, layouts = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = next((after + name[len(b) :] for b, after in moved.items() if name.startswith(b)), name)
        found = attached_layout(parameter)
        assert found is not None
        layouts[name] = found
    return replace(applied, layouts=layouts, whole_names=names)


def _make_local(model: nn.Module, applied: AppliedPlan) -> dict[str, AttachedLayout]:
    """Replaces each parameter by this rank's piece of it, in all modules that hold it."""
    placed = applied.plan.placed_parameters()
    pieces: dict[torch.Tensor, nn.Parameter] = {}
    made: set[int] = set()
    layouts: dict[str, AttachedLayout] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(parameter) in made:  # a module that is reachable under two names
                piece = parameter
            else:
                if parameter not in pieces:
                    attached = applied.layout_of(tuple(parameter.shape), placed[name].held)
                    pieces[parameter] = _piece(parameter, attached)
                    made.add(id(pieces[parameter]))
                piece = module._parameters[attribute] = pieces[parameter]
            attached_now = attached_layout(piece)
            assert attached_now is not None
            layouts[name] = attached_now
    return layouts


def _piece(parameter: nn.Parameter, attached: AttachedLayout) -> nn.Parameter:
    piece = parameter
    if attached.shard_groups:
        with torch.no_grad():
            piece = nn.Parameter(attached.take(parameter.detach()), requires_grad=parameter.requires_grad)
        piece.__dict__.update(vars(parameter))
    attach_layout(piece, attached)
    return piece


def _divide_counts(modules: dict[str, nn.Module], applied: AppliedPlan) -> None:
    for name, spec in applied.plan.modules.items():
        for attribute, axis in spec.divides.items():
            setattr(modules[name], attribute, getattr(modules[name], attribute) // applied.lines[axis].size)


def _boundaries(
    modules: dict[str, nn.Module], applied: AppliedPlan, dispatches: Mapping[str, Dispatch]
) -> dict[str, Boundary]:
    """The boundaries that do something, by module name."""
    conversions = _parameter_steps(applied)
    boundaries = {}
    for name in dict.fromkeys([*applied.plan.modules, *conversions]):
        spec = applied.plan.modules.get(name, ModuleSpec())
        boundary = _boundary(modules[name], name, spec, conversions.get(name, {}), applied.lines)
        boundary = replace(boundary, dispatch=dispatches.get(name))
        if not boundary.is_empty:
            boundaries[name] = boundary
    return boundaries


def _parameter_steps(applied: AppliedPlan) -> dict[str, dict[str, Any]]:
    """Owner -> attribute -> steps, for parameters that are not used as they are held."""
    found: dict[str, dict[str, Any]] = {}
    apart = {name: axis for name, spec in applied.plan.modules.items() if (axis := spec.dispatch) is not None}
    for name, entry in applied.plan.placed_parameters().items():
        where = f"parameter {name}"
        steps = compile_steps(entry.held, entry.in_use, applied.lines, where)
        for axis in applied.plan.batch:
            is_apart = any(axis == by and name.startswith(f"{module}.") for module, by in apart.items())
            if is_apart or placement_on(entry.held, axis).is_shard:
                mean = mean_step(applied.lines[axis], where)
                steps = steps if mean is None else (*steps, mean)
        if steps:
            owner, _, attribute = name.rpartition(".")
            found.setdefault(owner, {})[attribute] = steps
    return found


def _boundary(
    module: nn.Module, name: str, spec: ModuleSpec, parameters: dict[str, Any], lines: Mapping[str, AxisGroup]
) -> Boundary:
    where = f"module {name or '(model)'}"
    positions = input_positions(module, name, spec)
    inputs = [
        (positions[key], key, compile_steps(entry.arrives, entry.needs, lines, f"{where}, input {key}"))
        for key, entry in spec.inputs.items()
    ]
    outputs = [
        (output_key(key), compile_steps(entry.produces, entry.leaves, lines, f"{where}, output {key}"))
        for key, entry in spec.outputs.items()
    ]
    lookup = None
    if spec.body == "vocabulary_embedding":
        [axis] = [axis for axis, p in spec.parameters["weight"].in_use.items() if p.is_shard]
        lookup = lines[axis] if lines[axis].size > 1 else None
        if lookup is not None:
            _localise_padding(module, lookup)
    return Boundary(
        name,
        inputs=tuple(entry for entry in inputs if entry[2]),
        outputs=tuple(entry for entry in outputs if entry[1]),
        parameters=tuple(parameters.items()),
        lookup=lookup,
    )


def _localise_padding(module: nn.Module, line: AxisGroup) -> None:
    """The padding row, which gets no gradient, lies on one rank."""
    assert isinstance(module, nn.Embedding)  # check_plan has seen to it
    if module.padding_idx is not None:
        rows = module.weight.shape[0]
        local = module.padding_idx - line.rank * rows
        module.padding_idx = local if 0 <= local < rows else None
