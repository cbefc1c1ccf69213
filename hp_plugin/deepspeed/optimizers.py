"""Optimizers of the JSON, built on sharded parameters; and what the engine expects to find on any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hp_plugin.core.muon import HyperMuon, route
from hp_plugin.core.optim import HyperAdamW
from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.host.words import did_you_mean

OWN = ("HyperAdamW", "HyperMuon")
"""Types that DeepSpeed does not know: it refuses a job that asks for one without this package."""

# Each updates every element by itself, so that it may work on shards.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "RMSprop")
# DeepSpeed puts the names that it knows itself into lower case.
_BY_LOWER_NAME = {name.lower(): name for name in (*OWN, *_ELEMENTWISE)}
# Which kernel DeepSpeed would take: there is one here.
_KERNEL_CHOICES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


def is_known(name: str) -> bool:
    """Whether the JSON may name this optimizer under HyperFSDP."""
    return name.lower() in _BY_LOWER_NAME


def build_optimizer(
    name: str, parameters: list[Any], options: Mapping[str, Any], *, model: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer of the JSON.

    Args:
        name: `optimizer.type`. "Adam" is AdamW unless `adam_w_mode` is false, as in DeepSpeed.
        parameters: Sharded parameters, or groups of them.
        options: `optimizer.params`.
        model: The sharded model, by whose structure HyperMuon routes parameters.

    Raises:
        UnsupportedError: The type is not elementwise, or not known.
        ConfigurationError: An option does not exist.
    """
    given = dict(options)
    name = _BY_LOWER_NAME.get(name.lower(), name)
    if "max_grad_norm" in given:
        raise ConfigurationError(
            '"max_grad_norm" is no option of an optimizer; remove it and give "gradient_clipping" at the top level.'
        )
    if name == "HyperMuon":
        return _build_muon(parameters, given, model)
    if not is_known(name):
        known = [*OWN, *_ELEMENTWISE]
        raise UnsupportedError(
            f'"optimizer.type" {name!r} is not supported with HyperFSDP: its step may need whole weights, of which '
            f"a rank holds a part{did_you_mean(name, known)}"
        )
    torch_adam = given.get("torch_adam", False)
    decoupled = bool(given.get("adam_w_mode", True)) or name != "Adam"
    for key in _KERNEL_CHOICES:
        given.pop(key, None)
    if name in ("Adam", "AdamW", "HyperAdamW"):
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


_MUON_NAMES = {"betas": "adam_betas", "eps": "adam_eps"}
"""Of frameworks that fill in the values of an Adam, which are those of the AdamW part here."""


_NAMES_OF_GROUPS = {"params", "param_names", "name", "moe"}
"""Keys of a group that ask for nothing; the last two are those of DeepSpeed's groups for experts."""


def _build_muon(parameters: list[Any], options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """HyperMuon, which decides by the model's structure and the full shapes which parameter Muon trains."""
    grouped = [entry for entry in parameters if isinstance(entry, dict)]
    own = sorted({key for group in grouped for key in group} - _NAMES_OF_GROUPS)
    if own:
        raise UnsupportedError(
            f"the parameter groups that were given have options of their own ({', '.join(own)}), but HyperMuon "
            "makes its groups itself, one for Muon and one for AdamW; pass plain parameters, or build a HyperMuon "
            "and pass it as the optimizer."
        )
    given = {id(p) for entry in parameters for p in (entry["params"] if isinstance(entry, dict) else [entry])}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if left_out:
        raise ConfigurationError(
            f"{len(left_out)} trainable parameters are not among those given to deepspeed.initialize "
            f"({left_out[0]}, ...), but HyperMuon routes the whole model; freeze them with requires_grad_(False)."
        )
    options = {_MUON_NAMES.get(key, key): value for key, value in options.items() if key not in _KERNEL_CHOICES}
    patterns = {"muon": options.pop("muon", None), "adamw": options.pop("adamw", None)}
    if isinstance(options.get("ns_dtype"), str):
        options["ns_dtype"] = _dtype(options["ns_dtype"])
    if "adam_betas" in options:
        options["adam_betas"] = tuple(options["adam_betas"])
    return HyperMuon(route(model, **patterns), **options)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f'"optimizer.params.ns_dtype" is {name!r}; expected "bfloat16" or "float32".')
    return found


_SETS_RATES = ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest")


def check_scheduler(optimizer: torch.optim.Optimizer, name: str | None, options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where a scheduler of DeepSpeed would give both halves of HyperMuon one rate."""
    if not isinstance(optimizer, HyperMuon) or name not in _SETS_RATES:
        return
    single = [key for key, value in options.items() if key.endswith("lr") and not isinstance(value, (list, tuple))]
    if single and len({group["lr"] for group in optimizer.param_groups}) > 1:
        rates = [group["lr"] for group in optimizer.param_groups]
        raise ConfigurationError(
            f'"scheduler.params.{single[0]}" is one number, which {name} gives to every parameter group, but the '
            f"groups of HyperMuon have the learning rates {rates}; give a list of {len(rates)} or use WarmupCosineLR."
        )


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


def complete_for_engine(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the attributes that DeepSpeed, Accelerate and HF Trainer read on `engine.optimizer`."""
    target: Any = optimizer
    target.overflow = False
    target._global_grad_norm = None
    target.loss_scale = target.cur_scale = 1.0
