"""Records what crosses the borders of a plan's modules, and the gradients that come back, in one run of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hp_plugin.core.dtensor.boundary import input_positions, output_key
from hp_plugin.core.dtensor.plan import ShardingPlan

Side = Literal["input", "output"]


class Crossing(NamedTuple):
    """One tensor at the border of one call of a module."""

    module: str
    side: Side
    name: str
    call: int


@dataclass
class Trace:
    """What one run recorded.

    Attributes:
        values: crossing -> value, in the order of forward (an output when its module has finished).
        gradients: crossing -> gradient, in the order of backward.
    """

    values: dict[Crossing, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Crossing, torch.Tensor] = field(default_factory=dict)
    is_forward: bool = True

    def record(self, crossing: Crossing, tensor: torch.Tensor) -> torch.Tensor:
        """Records `tensor`, and its gradient when it comes. Returns an alias that stands for this crossing alone."""
        self.values[crossing] = tensor.detach()
        if not tensor.requires_grad:
            return tensor
        # An alias: the gradient of the tensor itself would also count other users, such as a residual connection.
        alias = tensor.view_as(tensor)

        def keep(gradient: torch.Tensor) -> None:
            self.gradients[crossing] = gradient.detach().clone()

        alias.register_hook(keep)
        return alias


@contextmanager
def traced(model: nn.Module, plan: ShardingPlan) -> Iterator[Trace]:
    """Records the named inputs and outputs of the modules of `plan` while the context lasts.

    Set `is_forward` to False before backward: forwards that activation checkpointing repeats are not recorded.
    """
    trace = Trace()
    modules = dict(model.named_modules(remove_duplicate=False))
    handles: list[Any] = []
    for name, spec in plan.modules.items():
        module = modules[name]
        recorder = _Recorder(trace, name, input_positions(module, name, spec), list(spec.outputs))
        if spec.inputs:
            handles.append(module.register_forward_pre_hook(recorder.before, with_kwargs=True))
        if spec.outputs:
            handles.append(module.register_forward_hook(recorder.after))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Recorder:
    """The hooks of one module."""

    trace: Trace
    module: str
    positions: Mapping[str, int]
    outputs: list[str]
    entered: int = 0
    left: int = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.trace.is_forward:
            return None
        positional, keywords = list(args), dict(kwargs)
        for name, position in self.positions.items():
            place: Any = positional if position < len(positional) else keywords
            key: Any = position if position < len(positional) else name
            tensor = place[key] if position < len(positional) else keywords.get(name)
            if isinstance(tensor, torch.Tensor):
                place[key] = self.trace.record(Crossing(self.module, "input", name, self.entered), tensor)
        self.entered += 1
        return tuple(positional), keywords

    def after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if not self.trace.is_forward:
            return None
        for name in self.outputs:
            key = output_key(name)
            if key is None or (key == "first" and isinstance(result, torch.Tensor)):
                result = self._record(name, result)
            elif isinstance(result, tuple):
                index = 0 if key == "first" else int(key)
                result = (*result[:index], self._record(name, result[index]), *result[index + 1 :])
            else:
                result[key] = self._record(name, result[key])
        self.left += 1
        return result

    def _record(self, name: str, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self.trace.record(Crossing(self.module, "output", name, self.left), tensor)
