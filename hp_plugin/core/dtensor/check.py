"""`check_plan`: refuses a plan that cannot be right for a model, before anything is changed."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator

import torch
from torch import nn

from hp_plugin.core.dtensor.boundary import conversion_order, input_positions
from hp_plugin.core.dtensor.collectives import is_possible
from hp_plugin.core.dtensor.dispatch import count_experts
from hp_plugin.core.dtensor.placement import AxisPlacement
from hp_plugin.core.dtensor.plan import (
    ModuleSpec,
    ParameterSpec,
    Placed,
    ShardingPlan,
    describe_placed,
    placement_on,
    same_placed,
)
from hp_plugin.core.dtensor.roles import is_vocabulary_embedding
from hp_plugin.errors import ConfigurationError, UnsupportedError


def check_plan(model: nn.Module, plan: ShardingPlan) -> None:
    """Checks `plan` against the structure of `model`. No communication, no forward.

    Raises:
        ConfigurationError: an unknown module, parameter, input or axis; a dim, or a count of heads, blocks or experts,
            that an axis does not divide; a parameter covered twice or not at all; a tied parameter held in two ways;
            neighbours in an `nn.Sequential` that do not fit.
        UnsupportedError: a conversion that no boundary makes.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for axis in plan.batch:
        if axis not in plan.axes:
            raise ConfigurationError(f"the plan divides the batch over axis {axis!r}, which is not among its axes.")
    for name, spec in plan.modules.items():
        if name not in modules:
            raise ConfigurationError(
                f"the plan names module {name!r}, which the model does not have.{_near(name, modules)}"
            )
        _check_module(modules[name], name, spec, plan)
    _check_parameters(model, plan)
    _check_sequentials(modules, plan)


def _near(name: str, known: dict[str, nn.Module]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_module(module: nn.Module, name: str, spec: ModuleSpec, plan: ShardingPlan) -> None:
    where = f"module {name or '(model)'}"
    input_positions(module, name, spec)
    for label, before, after in _conversions(spec):
        for axis in {*before, *after} - set(plan.axes):
            raise ConfigurationError(
                f"{where}, {label}: axis {axis!r} is unknown; the plan's axes are {', '.join(plan.axes)}."
            )
        for axis in conversion_order(before, after, list(plan.axes), f"{where}, {label}"):
            one, other = placement_on(before, axis), placement_on(after, axis)
            if not is_possible(one, other):
                raise UnsupportedError(
                    f"{where}, {label}: a boundary cannot convert {one} to {other} on axis {axis}; "
                    "docs/sharding-plan.md lists the conversions."
                )
    if spec.body == "vocabulary_embedding":
        _check_embedding(module, where, spec)
    if spec.dispatch is not None:
        _check_experts(module, name, spec.dispatch, plan)
    for attribute, axis in spec.divides.items():
        if axis not in plan.axes:
            raise ConfigurationError(f"{where}: {attribute} is divided by axis {axis!r}, which the plan does not have.")
        count = getattr(module, attribute, None)
        if not isinstance(count, int):
            raise ConfigurationError(
                f"{where}: the plan divides attribute {attribute!r}, which is {count!r} and not an integer."
            )
        if count % plan.axes[axis]:
            raise ConfigurationError(
                f"{where}: {attribute} is {count}, which axis {axis} with {plan.axes[axis]} ranks does not divide; use "
                f"a number of ranks that divides {count}."
            )


def _conversions(spec: ModuleSpec) -> Iterator[tuple[str, Placed, Placed]]:
    for key, inp in spec.inputs.items():
        yield f"input {key}", inp.arrives, inp.needs
    for key, out in spec.outputs.items():
        yield f"output {key}", out.produces, out.leaves
    for key, param in spec.parameters.items():
        yield f"parameter {key}", param.held, param.in_use


def _check_embedding(module: nn.Module, where: str, spec: ModuleSpec) -> None:
    if not is_vocabulary_embedding(module):
        raise ConfigurationError(
            f"{where} is a {type(module).__name__}, but a vocabulary_embedding must be nn.Embedding."
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise UnsupportedError(
                f"{where} has {option} set, which needs all rows at once; unset it, or replicate the embedding."
            )
    entry = spec.parameters.get("weight")
    shards = [] if entry is None else [p for p in entry.in_use.values() if p.is_shard]
    if len(shards) != 1 or shards[0] != AxisPlacement("shard", 0):
        raise ConfigurationError(
            f"{where}: a vocabulary_embedding needs its weight on one axis as shard(0), but it is "
            f"{'not in the entry' if entry is None else describe_placed(entry.in_use)}."
        )


def _check_experts(module: nn.Module, name: str, axis: str, plan: ShardingPlan) -> None:
    if axis not in plan.axes:
        raise ConfigurationError(
            f"module {name}: its experts are divided by axis {axis!r}, which the plan does not have."
        )
    experts, ranks = count_experts(name, module), plan.axes[axis]
    if experts % ranks:
        raise ConfigurationError(
            f"module {name} holds {experts} experts, which axis {axis} with {ranks} ranks does not divide; use a "
            f"number of ranks that divides {experts}."
        )
    if type(module) is nn.ModuleList:
        raise UnsupportedError(
            f"module {name} is a list of experts that its parent calls one by one, so nothing could send tokens to "
            "other ranks; move the loop into a forward of the list's own, of tokens (T, hidden), chosen experts (T, k) "
            "and weights (T, k)."
        )
    placed = plan.placed_parameters()
    for attribute, _ in module.named_parameters(recurse=False):
        entry = placed.get(f"{name}.{attribute}")
        if entry is not None and placement_on(entry.held, axis) != AxisPlacement("shard", 0):
            raise ConfigurationError(
                f"parameter {name}.{attribute} holds experts along dim 0, which axis {axis} divides; hold it as "
                f"{axis}: shard(0)."
            )


def _check_parameters(model: nn.Module, plan: ShardingPlan) -> None:
    placed = plan.placed_parameters()
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name in placed:
        if name not in tensors:
            raise ConfigurationError(
                f"the plan covers parameter {name!r}, which the model does not have.{_near(name, tensors)}"  # type: ignore[arg-type]
            )
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in tensors.items():
        names.setdefault(parameter, []).append(name)
    for tensor, aliases in names.items():
        covered = [name for name in aliases if name in placed]
        if not covered:
            raise ConfigurationError(
                f"parameter {' = '.join(aliases)} is not covered by the plan; add it to the entry of its module, "
                "with an empty placement if every rank holds it whole."
            )
        for name in covered[1:]:
            if not same_placed(placed[covered[0]].held, placed[name].held):
                raise ConfigurationError(
                    f"{covered[0]} and {name} are one tied parameter, but the plan holds it as "
                    f"{describe_placed(placed[covered[0]].held)} and as {describe_placed(placed[name].held)}."
                )
        if len(covered) < len(aliases):
            missing = [name for name in aliases if name not in placed]
            raise ConfigurationError(
                f"{covered[0]} is tied to {', '.join(missing)}, which the plan does not cover; add the other name, "
                "held alike, so that its use is known too."
            )
        for name in covered:
            _check_dims(name, tensor, placed[name], plan)


def _check_dims(name: str, tensor: torch.Tensor, entry: ParameterSpec, plan: ShardingPlan) -> None:
    held = entry.held
    for placement in held.values():
        if placement.kind in ("copy", "partial"):
            raise ConfigurationError(
                f"parameter {name} is held as {placement}; hold it as replicate or shard, and use it as {placement}."
            )
    ways: dict[int, int] = {}
    for axis, placement in held.items():
        if not placement.is_shard:
            continue
        if not -tensor.ndim <= placement.dim < tensor.ndim:
            raise ConfigurationError(
                f"parameter {name} has {tensor.ndim} dims, but axis {axis} divides dim {placement.dim}."
            )
        dim = placement.dim % tensor.ndim
        ways[dim] = ways.get(dim, placement.blocks) * plan.axes[axis]
        if tensor.shape[dim] % ways[dim]:
            blocks = f" in {placement.blocks} blocks" if placement.blocks > 1 else ""
            raise ConfigurationError(
                f"parameter {name} has shape {tuple(tensor.shape)}; axis {axis} with {plan.axes[axis]} ranks does not "
                f"divide its dim {dim}{blocks}. Pad the model's size, choose another number of ranks, or replicate it."
            )
        if tensor.shape[dim] // ways[dim] % entry.unit:
            heads = tensor.shape[dim] // placement.blocks // entry.unit
            raise ConfigurationError(
                f"parameter {name} has {heads} heads of {entry.unit} rows, "
                f"which axis {axis} with {plan.axes[axis]} ranks does not divide. Choose a number of ranks that does."
            )


def _check_sequentials(modules: dict[str, nn.Module], plan: ShardingPlan) -> None:
    """What one member of an `nn.Sequential` gives must be what the next one takes."""
    for name, module in modules.items():
        if not isinstance(module, nn.Sequential):
            continue
        members = [f"{name}.{key}" if name else key for key in module._modules]
        for one, other in itertools.pairwise(members):
            left, right = plan.modules.get(one), plan.modules.get(other)
            if left is None or right is None or "output" not in left.outputs or not right.inputs:
                continue
            leaves, (key, entry) = left.outputs["output"].leaves, next(iter(right.inputs.items()))
            if not same_placed(leaves, entry.arrives):
                raise ConfigurationError(
                    f"the output of {one} leaves as {describe_placed(leaves)}, but input {key} of {other}, which "
                    f"follows it, arrives as {describe_placed(entry.arrives)}; make them equal."
                )
