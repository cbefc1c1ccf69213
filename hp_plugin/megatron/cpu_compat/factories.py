"""``device="cuda"`` in tensor factories and moves means the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hp_plugin.megatron.cpu_compat.patches import Ledger

AREA = "tensor factories"

_FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "eye",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
)
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def is_cuda(device: object) -> bool:
    """Whether ``device`` names a CUDA device; a bare index does, since ``current_device()`` is one."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":", 1)[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def apply(ledger: Ledger) -> None:
    """Replace factories of ``torch`` and the methods of ``Tensor`` and ``Module`` that take a device."""
    for name in _FACTORIES:
        ledger.replace(torch, name, _on_cpu(getattr(torch, name)), area=AREA)
    for name in _METHODS:
        ledger.replace(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)), area=AREA)
    ledger.replace(torch.Tensor, "to", _to_cpu(torch.Tensor.to), area=AREA)
    ledger.replace(torch.Tensor, "cuda", _itself, area=AREA)
    ledger.replace(torch.nn.Module, "cuda", _itself, area=AREA)


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return factory


def _to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        moved: torch.Tensor = original(self, *args, **kwargs)
        return moved

    return to


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self
