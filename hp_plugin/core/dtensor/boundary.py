"""`Boundary`: what runs around the forward of one module, compiled once; identity steps are not in it.

A module with a boundary gets a subclass of its own class, whose `forward` is: convert arguments, put parameters as the
body uses them in their place, run the original forward, put the parameters back, convert results. A subclass, and not
an attribute `forward`, so that copies of the module use their own parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor.collectives import AxisGroup, Step, make_step
from hp_plugin.core.dtensor.dispatch import Dispatch
from hp_plugin.core.dtensor.placement import AxisPlacement
from hp_plugin.core.dtensor.plan import ModuleSpec, placement_on
from hp_plugin.errors import ConfigurationError, UnsupportedError

Steps = tuple[Step, ...]


def conversion_order(
    before: Mapping[str, AxisPlacement], after: Mapping[str, AxisPlacement], axes: Sequence[str], where: str
) -> list[str]:
    """The axes whose placement changes, in the order in which they must be converted.

    Where several axes divide one dim, the first one cut last is glued first: pieces of pieces are gathered from the
    innermost axis outwards, and cut from the outermost inwards.

    Raises:
        UnsupportedError: an axis changes that others, which do not, divide further.
    """
    changed = [axis for axis in axes if placement_on(before, axis) != placement_on(after, axis)]
    for axis in changed:
        for inner in axes[axes.index(axis) + 1 :]:
            kept = placement_on(before, inner)
            touched = {p.dim for p in (placement_on(before, axis), placement_on(after, axis)) if p.is_shard}
            if inner not in changed and kept.is_shard and kept.dim in touched:
                raise UnsupportedError(
                    f"{where}: axis {axis} is converted on dim {kept.dim}, which axis {inner} goes on dividing; "
                    f"convert {inner} too, or divide another dim."
                )
    released = [axis for axis in changed if placement_on(before, axis).is_shard]
    return released[::-1] + [axis for axis in changed if axis not in released]


def compile_steps(
    before: Mapping[str, AxisPlacement],
    after: Mapping[str, AxisPlacement],
    lines: Mapping[str, AxisGroup],
    where: str,
) -> Steps:
    """The steps from `before` to `after`, identities dropped."""
    steps = []
    for axis in conversion_order(before, after, list(lines), where):
        step = make_step(placement_on(before, axis), placement_on(after, axis), lines[axis], where)
        if step is not None:
            steps.append(step)
    return tuple(steps)


@dataclass(frozen=True, eq=False)
class Boundary:
    """The compiled boundary of one module.

    Attributes:
        name: the module's name, for messages.
        inputs: position and name of an argument of `forward`, and its steps.
        outputs: key and steps; the key is None for a single tensor, "first" for that or the first of a tuple.
        parameters: name of a parameter of the module itself, and its steps.
        lookup: of a vocabulary-sharded embedding, the axis that divides the vocabulary.
        dispatch: of a module of experts, how tokens reach them.
    """

    name: str
    inputs: tuple[tuple[int, str, Steps], ...] = ()
    outputs: tuple[tuple[int | str | None, Steps], ...] = ()
    parameters: tuple[tuple[str, Steps], ...] = ()
    lookup: AxisGroup | None = None
    dispatch: Dispatch | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        return self  # immutable, and knows no module

    @property
    def is_empty(self) -> bool:
        """Whether nothing would run."""
        return not (self.inputs or self.outputs or self.parameters or self.lookup or self.dispatch)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Converts the arguments of a call. Every rank of the axes must call."""
        for position, keyword, steps in self.inputs:
            if position < len(args):
                args = (*args[:position], self._run(steps, args[position], keyword), *args[position + 1 :])
            elif keyword in kwargs:
                kwargs[keyword] = self._run(steps, kwargs[keyword], keyword)
        return args, kwargs

    def leave(self, result: Any) -> Any:
        """Converts the results of a call. Every rank of the axes must call."""
        for key, steps in self.outputs:
            if key == "first" and isinstance(result, tuple):
                key = 0
            if key is None or (key == "first" and isinstance(result, torch.Tensor)):
                result = self._run(steps, result, "output")
            elif isinstance(key, int) and isinstance(result, tuple):
                converted = self._run(steps, result[key], str(key))
                result = (*result[:key], converted, *result[key + 1 :])
            elif isinstance(result, (list, Mapping)):
                result[key] = self._run(steps, result[key], str(key))  # type: ignore[index]
            else:
                raise ConfigurationError(
                    f"module {self.name}: the plan names output {key!r}, but the module returned a "
                    f"{type(result).__name__}; name it output if it is a single tensor."
                )
        return result

    def _run(self, steps: Steps, value: Any, what: str) -> Any:
        if isinstance(value, torch.Tensor):
            for step in steps:
                value = step(value)
            return value
        if value is not None:  # an optional argument that was not given
            raise ConfigurationError(
                f"module {self.name}: the plan converts {what}, which is a {type(value).__name__} and not a tensor; "
                "name the tensor inside it, or remove the entry."
            )
        return None


def run_forward(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a module with a boundary; `forward` is the original, a function of the module first."""
    boundary: Boundary = module._hp_boundary  # type: ignore[assignment]
    if boundary.inputs:
        args, kwargs = boundary.enter(args, kwargs)
    if boundary.lookup is not None:
        forward = functools.partial(_look_up, forward, boundary.lookup)
    if boundary.dispatch is not None:
        forward = functools.partial(boundary.dispatch.run, forward)
    if not boundary.parameters:
        return boundary.leave(forward(module, *args, **kwargs))
    # Straight into the dict: the values are tensors that autograd made, which `nn.Module.__setattr__` refuses.
    parameters: dict[str, Any] = module._parameters
    held = [(attribute, parameters[attribute]) for attribute, _ in boundary.parameters]
    try:
        for attribute, steps in boundary.parameters:
            parameters[attribute] = boundary._run(steps, parameters[attribute], attribute)
        result = forward(module, *args, **kwargs)
    finally:
        for attribute, parameter in held:
            parameters[attribute] = parameter
    return boundary.leave(result)


def _look_up(forward: Any, line: AxisGroup, module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a vocabulary-sharded embedding: those that the rank holds, and zeros for the others."""
    rows = module._parameters["weight"].shape[0]  # type: ignore[union-attr]  # check_plan has seen it
    local = ids - line.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    found: torch.Tensor = forward(module, local.masked_fill(elsewhere, 0))
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


@functools.cache
def planned_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `cls` whose forward runs the boundary; one for each class."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_forward(self, cls.forward, args, kwargs)

    return type(f"Planned{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})


def install(module: nn.Module, boundary: Boundary) -> None:
    """Gives `module` its boundary. Refuses a module whose `forward` was replaced on the object."""
    if "forward" in vars(module):
        raise UnsupportedError(
            f"module {boundary.name} has a forward of its own, set on the object, which the boundary could not wrap; "
            "apply the plan before other tools replace forward."
        )
    if "_hp_boundary" in vars(module):
        raise UnsupportedError(
            f"module {boundary.name} is also module {module._hp_boundary.name}, one object under two names; give "  # type: ignore[union-attr]
            "boundaries to modules that are used under one name."
        )
    module._hp_boundary = boundary  # type: ignore[assignment]
    module.__class__ = planned_class(type(module))  # type: ignore[arg-type]  # mypy sees no hash in a class


def input_positions(module: nn.Module, name: str, spec: ModuleSpec) -> dict[str, int]:
    """Input of the entry -> position among the arguments of `forward`; one past all for keyword-only ones.

    Raises:
        ConfigurationError: `forward` has no such parameter.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positions = {}
    for key in spec.inputs:
        if key in names:
            positions[key] = names.index(key)
        elif key in keyword_only or takes_any:
            positions[key] = 1_000_000
        else:
            raise ConfigurationError(
                f"module {name or '(model)'}: the plan names input {key!r}, but forward takes "
                f"({', '.join(p.name for p in parameters)})."
            )
    return positions


def argument_names(module: nn.Module) -> list[str]:
    """The names of the arguments of `forward` that a call may give by position, in order."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def output_key(name: str) -> int | str | None:
    """How an output of the plan is found in what a module returns."""
    if name == "output":
        return None
    return int(name) if name.isdigit() else name
