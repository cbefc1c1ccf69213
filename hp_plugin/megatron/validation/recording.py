"""What goes through a model during a step: micro-batches, outputs of modules, gradients of outputs and inputs.

Modules are named by their place in the whole model, so that a layer has the same name on every pipeline stage.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hp_plugin.megatron.releases.differences import unwrapped

_LAYER = re.compile(r"^(.*\.)?layers\.\d+$")
_RECORDED = re.compile(
    r"^(embedding|output_layer|(\w+\.)?final_layernorm|.*layers\.\d+(\.(input_layernorm|self_attention|pre_mlp_layernorm|mlp))?)$"
)


class Event(NamedTuple):
    """One output: of the module with this global name, in this micro-batch of this rank."""

    module: str
    micro_batch: int


class Recorder:
    """Keeps the outputs of modules of `chunks`, and what their gradients are, from one step.

    Attributes:
        outputs: By event, in the order of forward.
        gradients: Of outputs, by event.
        input_gradients: Of what the module takes first; of this use of it alone.
        batches: What each call of the data iterator gave on this rank, in order.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = [unwrapped(chunk) for chunk in chunks]
        self.outputs: dict[Event, torch.Tensor] = {}
        self.gradients: dict[Event, torch.Tensor] = {}
        self.input_gradients: dict[Event, torch.Tensor] = {}
        self.batches: list[Any] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, the model's modules are recorded."""
        handles = []
        for chunk in self._chunks:
            calls = _Calls()
            handles += [
                chunk.register_forward_pre_hook(calls.begin),
                chunk.register_forward_hook(calls.end, always_call=True),
            ]
            for name, module in global_names(chunk):
                handles.append(module.register_forward_hook(functools.partial(self._keep, name, calls)))
                watch = functools.partial(self._watch_input, name, calls)
                handles.append(module.register_forward_pre_hook(watch, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A forward step function whose data iterator is recorded."""

        @functools.wraps(original)
        def forward_step(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            recorded = None if data_iterator is None else _Recorded(data_iterator, self.batches)
            return original(recorded, *args, **kwargs)

        return forward_step

    def _keep(self, name: str, calls: _Calls, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is None or not calls.inside:
            return  # a forward of recomputation
        event = Event(name, calls.number)
        self.outputs[event] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(_note, self.gradients, event))

    def _watch_input(
        self, name: str, calls: _Calls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hands the module an alias of its input, whose gradient is that of this use alone."""
        tensor = _first_tensor([*args, *kwargs.values()])
        if tensor is None or not tensor.requires_grad or not calls.inside:
            return None
        alias = tensor.view_as(tensor)
        alias.register_hook(functools.partial(_note, self.input_gradients, Event(name, calls.number)))
        return (
            tuple(alias if value is tensor else value for value in args),
            {key: alias if value is tensor else value for key, value in kwargs.items()},
        )


def holders_of(chunks: Sequence[Any]) -> dict[int, str]:
    """The innermost recorded module that holds a parameter, "" if there is none, by `id` of the parameter."""
    found: dict[int, str] = {}
    for chunk in map(unwrapped, chunks):
        found.update(dict.fromkeys(map(id, chunk.parameters()), ""))
        for name, module in global_names(chunk):  # what holds comes before what it holds
            found.update(dict.fromkeys(map(id, module.parameters()), name))
    return found


def global_names(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The recorded modules of a model chunk, with the number of a layer in the whole model in its name."""
    numbers: dict[str, str] = {}
    found = []
    for name, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        if _LAYER.match(name) and isinstance(number, int):
            numbers[name] = f"{name.rpartition('.')[0]}.{number - 1}"
        for local, whole in numbers.items():
            if name == local or name.startswith(f"{local}."):
                name = whole + name[len(local) :]
                break
        if _RECORDED.match(name):
            found.append((name, module))
    return found


def _note(kept: dict[Event, torch.Tensor], event: Event, gradient: torch.Tensor) -> None:
    kept[event] = gradient.detach().clone()


class _Calls:
    """Counts the forward passes of a chunk, and says whether one is going on."""

    def __init__(self) -> None:
        self.number = -1
        self.inside = False

    def begin(self, *unused: Any) -> None:
        self.number += 1
        self.inside = True

    def end(self, *unused: Any) -> None:
        self.inside = False


class _Recorded:
    """An iterator that appends what it gives to a list."""

    def __init__(self, iterator: Any, batches: list[Any]) -> None:
        self._iterator, self._batches = iterator, batches

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        item = next(self._iterator)
        self._batches.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, (tuple, list)):
        output = next((item for item in output if isinstance(item, torch.Tensor)), None)
    return output if isinstance(output, torch.Tensor) and output.is_floating_point() else None
