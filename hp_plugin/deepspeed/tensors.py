"""DeepSpeed's `safe_*` functions: those on full values know our parameters, those on flat partitions refuse them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import deepspeed.utils
import torch

from hp_plugin.deepspeed import access
from hp_plugin.errors import ConfigurationError, UnsupportedError


def _get_param(param: torch.Tensor) -> torch.Tensor:
    # Of a frozen parameter too, for which ZeRO has no fp32 value and gives None.
    return access.full_value(param)


def _set_param(param: torch.Tensor, value: torch.Tensor) -> None:
    access.write_full(param, value)


def _get_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    state = access.state_of(param, optim_state_key)
    return None if state is None else access.full_value(state)


def _set_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    state = access.state_of(param, optim_state_key)
    if state is None:
        raise ConfigurationError(
            f"the optimizer has no state {optim_state_key!r} of this parameter; state is made by the first step."
        )
    access.write_full(state, value)


def _get_grad(param: torch.Tensor) -> torch.Tensor | None:
    return None if param.grad is None else access.full_value(param.grad)


def _set_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    if param.grad is None:
        raise ConfigurationError("this parameter has no gradient; there is one between backward and step.")
    access.write_full(param.grad, value)


_OURS: dict[str, Callable[..., Any]] = {
    "safe_get_full_fp32_param": _get_param,
    "safe_set_full_fp32_param": _set_param,
    "safe_get_full_optimizer_state": _get_state,
    "safe_set_full_optimizer_state": _set_state,
    "safe_get_full_grad": _get_grad,
    "safe_set_full_grad": _set_grad,
}

_VECTORIZED = "safe_update_full_grad_vectorized"
_LOCAL = (
    "safe_get_local_fp32_param",
    "safe_set_local_fp32_param",
    "safe_get_local_optimizer_state",
    "safe_set_local_optimizer_state",
    "safe_get_local_grad",
    "safe_set_local_grad",
)


def install() -> Callable[[], None]:
    """Replaces the functions where DeepSpeed exports them; returns what puts them back."""
    # The name in deepspeed.utils is a class; this is the module of the same name.
    places = (importlib.import_module("deepspeed.utils.tensor_fragment"), deepspeed.utils)
    # Releases differ in which of the others they have.
    names = [*_OURS, *(name for name in (*_LOCAL, _VECTORIZED) if hasattr(places[0], name))]
    originals = {name: getattr(places[0], name) for name in names}
    for name, original in originals.items():
        if name == _VECTORIZED:
            ours = _vectorized(original)
        else:
            ours = _for_ours(_OURS.get(name) or _refusal(name), original)
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


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{name} works on the flat partition of a ZeRO-3 parameter, which HyperFSDP does not have; use "
            f"{name.replace('_local_', '_full_')}, which every rank calls with or for the full value."
        )

    return refuse


def _vectorized(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(param_list: Any, update_func: Callable[..., torch.Tensor]) -> Any:
        parameters = list(param_list)
        for param in filter(access.is_ours, parameters):
            if param.grad is not None:
                access.write_full(param.grad, update_func(access.full_value(param.grad), param))
        others = [param for param in parameters if not access.is_ours(param)]
        return original(others, update_func) if others else None

    return function
