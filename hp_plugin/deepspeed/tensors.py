"""DeepSpeed's `safe_*` functions, on full values and on what a rank holds, for our parameters.

What ZeRO-3 calls the local part is a stretch of the flattened parameter, padded on the last rank; ours is the rank's
own shard, flattened: its rows, and nothing on a rank that has none. Functions give copies, which change nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import deepspeed.utils
import torch

from hp_plugin.deepspeed import access
from hp_plugin.errors import ConfigurationError

Read = Callable[[torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor], None]


def _get_param(param: torch.Tensor, read: Read) -> torch.Tensor | None:
    # As in ZeRO, a frozen parameter has no fp32 value beside its weights; those are in GatheredParameters.
    return read(param) if param.requires_grad else None


def _set_param(param: torch.Tensor, value: torch.Tensor, write: Write) -> None:
    write(param, value)


def _get_state(param: torch.Tensor, optim_state_key: str, read: Read) -> torch.Tensor | None:
    state = access.state_of(param, optim_state_key)
    return None if state is None else read(state)


def _set_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str, write: Write) -> None:
    state = access.state_of(param, optim_state_key)
    if state is None:
        raise ConfigurationError(
            f"the optimizer has no state {optim_state_key!r} of this parameter; state is made by the first step."
        )
    write(state, value)


def _get_grad(param: torch.Tensor, read: Read) -> torch.Tensor | None:
    gradient = access.gradient_of(param)
    return None if gradient is None else read(gradient)


def _set_grad(param: torch.Tensor, value: torch.Tensor, write: Write) -> None:
    gradient = access.gradient_of(param)
    if gradient is None:
        raise ConfigurationError("this parameter has no gradient; there is one between backward and step.")
    write(gradient, value)


def _functions() -> dict[str, Callable[..., Any]]:
    """Ours by the names of DeepSpeed's."""
    found: dict[str, Callable[..., Any]] = {}
    for extent, read, write in (
        ("full", access.full_value, access.write_full),
        ("local", access.local_value, access.write_local),
    ):
        for what, getter, setter in (
            ("fp32_param", _get_param, _set_param),
            ("optimizer_state", _get_state, _set_state),
            ("grad", _get_grad, _set_grad),
        ):
            found[f"safe_get_{extent}_{what}"] = functools.partial(getter, read=read)
            found[f"safe_set_{extent}_{what}"] = functools.partial(setter, write=write)
    return found


_VECTORIZED = "safe_update_full_grad_vectorized"


def install() -> Callable[[], None]:
    """Replaces the functions where DeepSpeed exports them; returns what puts them back."""
    # The name in deepspeed.utils is a class; this is the module of the same name.
    places = (importlib.import_module("deepspeed.utils.tensor_fragment"), deepspeed.utils)
    functions = _functions()
    originals = {name: getattr(places[0], name) for name in (*functions, _VECTORIZED)}
    for name, original in originals.items():
        ours = _vectorized(original) if name == _VECTORIZED else _for_ours(functions[name], original)
        for place in places:
            setattr(place, name, ours)

    def undo() -> None:
        for name, original in originals.items():
            for place in places:
                setattr(place, name, original)

    return undo


def _for_ours(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (ours if access.is_ours(param) else original)(param, *args, **kwargs)

    return function


def _vectorized(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(param_list: Any, update_func: Callable[..., torch.Tensor]) -> Any:
        parameters = list(param_list)
        for param in filter(access.is_ours, parameters):
            gradient = access.gradient_of(param)
            if gradient is not None:
                access.write_full(gradient, update_func(access.full_value(gradient), param))
        others = [param for param in parameters if not access.is_ours(param)]
        return original(others, update_func) if others else None

    return function
