"""Modules that tell a follower of their calls, and the tensors at their borders that a plan names."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hp_plugin.core.dtensor.boundary import input_positions, output_key
from hp_plugin.core.dtensor.plan import ModuleSpec, ShardingPlan
from hp_plugin.core.dtensor.validation.reference import Recorder


class Follower(Protocol):
    """Who is told of a call of a module."""

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the call; `forward` is what would run without a follower."""
        ...

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss function that is to be used in place of `function`."""
        ...


@functools.cache
def _followed_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        follower: Follower = self._hp_follower  # type: ignore[assignment]
        return follower.call(self, functools.partial(cls.forward, self), args, kwargs)

    return type(f"Followed{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})


def follow(model: nn.Module, follower: Follower) -> None:
    """Lets every module of `model` tell `follower` of its calls."""
    for name, module in model.named_modules():
        module._hp_follower = follower
        module._hp_path = name
        module.__class__ = _followed_class(type(module))  # type: ignore[arg-type]


def path_of(module: nn.Module) -> str:
    """The name under which the module was found first."""
    return str(module._hp_path)


def plain_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module without its boundary's work."""
    if "_hp_boundary" not in vars(module):
        return forward
    planned = type(module).__mro__[1]
    return functools.partial(planned.__mro__[1].forward, module)  # type: ignore[attr-defined]


def is_region(name: str, spec: ModuleSpec, regions: Sequence[str]) -> bool:
    """Whether a module is compared at its borders only: divided, it runs other operations than in one process."""
    return (
        spec.body != "plain"
        or spec.dispatch is not None
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in regions)
    )


def named_inputs(
    module: nn.Module, name: str, spec: ModuleSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors among the arguments that the plan names."""
    found = {}
    for key, position in input_positions(module, name, spec).items():
        value = args[position] if position < len(args) else kwargs.get(key)
        if isinstance(value, torch.Tensor):
            found[key] = value
    return found


def replace_inputs(
    module: nn.Module,
    name: str,
    spec: ModuleSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with these tensors in their places."""
    positional, keywords = list(args), dict(kwargs)
    for key, position in input_positions(module, name, spec).items():
        if key in tensors:
            if position < len(positional):
                positional[position] = tensors[key]
            else:
                keywords[key] = tensors[key]
    return tuple(positional), keywords


def named_outputs(result: Any, spec: ModuleSpec) -> dict[str, torch.Tensor]:
    """The tensors of what a module returned that the plan names."""
    found = {}
    for name in spec.outputs:
        key = output_key(name)
        value = result if _is_single(key, result) else result[0 if key == "first" else key]
        if isinstance(value, torch.Tensor):
            found[name] = value
    return found


def replace_outputs(result: Any, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What a module returned, with these tensors in their places."""
    for name, tensor in tensors.items():
        key = output_key(name)
        if _is_single(key, result):
            result = tensor
        elif isinstance(result, tuple):
            index = 0 if key == "first" else int(key)  # type: ignore[arg-type]
            result = (*result[:index], tensor, *result[index + 1 :])
        else:
            result[key] = tensor
    return result


def _is_single(key: int | str | None, result: Any) -> bool:
    return key is None or (key == "first" and isinstance(result, torch.Tensor))


class RecordingFollower:
    """Tells a `Recorder`, while there is one, of the calls of a model's modules.

    Args:
        plan: names the tensors at borders.
        regions: modules that are one operation.
    """

    def __init__(self, plan: ShardingPlan, regions: Sequence[str]) -> None:
        self._plan = plan
        self._regions = tuple(regions)
        self.recorder: Recorder | None = None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Follower`."""
        recorder = self.recorder
        if recorder is None or recorder.is_inside:
            return forward(*args, **kwargs)
        name = path_of(module)
        spec = self._plan.modules.get(name, ModuleSpec())
        if is_region(name, spec, self._regions):
            named = {f"{name}.{key}" if name else key: p for key, p in module.named_parameters()}
            return recorder.region(name, "region", forward, args, kwargs, named)
        inputs = named_inputs(module, name, spec, args, kwargs)
        return recorder.module(
            name, inputs, lambda: forward(*args, **kwargs), lambda result: named_outputs(result, spec)
        )

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See `Follower`."""

        def followed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self.recorder is None or self.recorder.is_inside:
                return function(*args, **kwargs)
            result: torch.Tensor = self.recorder.region("", "loss", function, args, kwargs, {})
            return result

        return followed


def follow_loss(model: nn.Module, follower: Follower) -> None:
    """Lets the loss that a model of transformers computes itself be followed as one operation."""
    if hasattr(model, "loss_function"):
        model.loss_function = follower.loss(model.loss_function)  # type: ignore[assignment, arg-type]
