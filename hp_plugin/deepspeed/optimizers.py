"""Optimizers of the JSON, built on sharded parameters; and what the engine expects to find on any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from hp_plugin.core.optim import HyperAdamW
from hp_plugin.deepspeed.schema import did_you_mean
from hp_plugin.errors import ConfigurationError, UnsupportedError

OWN = ("HyperAdamW", "HyperMuon")
"""Types that DeepSpeed does not know: it refuses a job that asks for one without this package."""

_ADAM = ("adam", "adamw")
# Each updates every element by itself, so that it may work on shards.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "RMSprop")
# Which kernel DeepSpeed would take: there is one here.
_KERNEL_CHOICES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


def is_known(name: str) -> bool:
    """Whether the JSON may name this optimizer under HyperFSDP."""
    return name in OWN or name.lower() in _ADAM or name in _ELEMENTWISE


def build_optimizer(name: str, parameters: list[Any], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of the JSON.

    Args:
        name: `optimizer.type`. "Adam" is AdamW unless `adam_w_mode` is false, as in DeepSpeed.
        parameters: Sharded parameters, or groups of them.
        options: `optimizer.params`.

    Raises:
        UnsupportedError: The type is not elementwise, or not known.
        ConfigurationError: An option does not exist.
    """
    given = dict(options)
    if "max_grad_norm" in given:
        raise ConfigurationError(
            '"max_grad_norm" is no option of an optimizer; remove it and give "gradient_clipping" at the top level.'
        )
    if name == "HyperMuon":
        return _build_muon(parameters, given)
    if not is_known(name):
        known = [*OWN, *_ELEMENTWISE]
        raise UnsupportedError(
            f'"optimizer.type" {name!r} is not supported with HyperFSDP: its step may need whole weights, of which '
            f"a rank holds a part{did_you_mean(name, known)}"
        )
    torch_adam = given.get("torch_adam", False)
    decoupled = bool(given.get("adam_w_mode", True)) or name.lower() == "adamw"
    for key in _KERNEL_CHOICES:
        given.pop(key, None)
    if name.lower() in _ADAM or name == "HyperAdamW":
        if name != "HyperAdamW" and not torch_adam:
            given.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own Adam; torch's is 0.01
        if given.pop("bias_correction", True) is False:
            raise UnsupportedError('"bias_correction": false is not supported with HyperFSDP; remove it.')
        given.pop("set_grad_none", None)
        if decoupled and not given.get("amsgrad", False):
            given.pop("amsgrad", None)
            return _make(HyperAdamW, parameters, given)
        name = "AdamW" if decoupled else "Adam"
    return _make(getattr(torch.optim, name), parameters, given)


def _build_muon(parameters: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    raise UnsupportedError('"optimizer.type" "HyperMuon" is not supported in DeepSpeed jobs yet; use "HyperAdamW".')


def _make(cls: type[torch.optim.Optimizer], parameters: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    known = [name for name in inspect.signature(cls).parameters if name not in ("self", "params")]
    for key in options:
        if key not in known:
            raise ConfigurationError(f'"optimizer.params" has the unknown key "{key}"{did_you_mean(key, known)}')
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return cls(parameters, **options)


def check_client(optimizer: Any) -> None:
    """Raises UnsupportedError for an optimizer object of a job that cannot step shards."""
    place = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if place.startswith(("deepspeed.", "apex.")):
        raise UnsupportedError(
            f"the optimizer {place} runs kernels of its own on whole parameters, but HyperFSDP gives it shards "
            "that are DTensors; use hp_plugin.HyperAdamW or an elementwise optimizer of torch.optim."
        )


class LossScale:
    """What `engine.optimizer.loss_scaler` is read for."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = self.loss_scale = scale


def complete_for_engine(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the attributes that DeepSpeed, Accelerate and HF Trainer read on `engine.optimizer`."""
    target: Any = optimizer
    target.overflow = False
    target._global_grad_norm = None
    target.loss_scale = target.cur_scale = 1.0
