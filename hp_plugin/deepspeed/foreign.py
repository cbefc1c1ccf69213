"""Fills an engine from what a checkpoint of another format, or of another optimizer, holds.

Tensors are read one at a time, whole, by every rank, which keeps its own part; there is no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_plugin.convert.contents import Contents, Stored
from hp_plugin.core.muon import HyperMuon
from hp_plugin.core.muon.convert import Conversion, Imported, Source, import_state
from hp_plugin.core.optim import HyperAdamW
from hp_plugin.core.optim.adamw import new_adamw_state, zeros_like_local
from hp_plugin.deepspeed import reporting
from hp_plugin.deepspeed.access import write_full
from hp_plugin.errors import ConfigurationError

_ADAMS = (HyperAdamW, torch.optim.Adam, torch.optim.AdamW)
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "initial_lr")
"""Of a parameter group, taken from the checkpoint as DeepSpeed does."""


@torch.no_grad()
def fill_weights(engine: Any, contents: Contents, *, strict: bool) -> None:
    """Parameters and buffers. Every rank must call.

    Raises:
        ConfigurationError: Names or shapes are not those of the model.
    """
    targets = dict(engine.module.named_parameters())
    absent = []
    for name, parameter in targets.items():
        source = _find(engine, contents, name, parameter)
        if source is None:
            absent.append(name)
        else:
            _check_shape(name, contents.weights[source].shape, parameter)
            write_full(parameter, contents.weights[source].read().to(parameter.dtype))
    for name, buffer in engine.module.named_buffers():
        stored = contents.buffers.get(name, contents.weights.get(name))
        if stored is not None:
            buffer.copy_(stored.read().view(buffer.shape))
    # Frozen parameters may have been left out of the checkpoint on purpose.
    needed = [name for name in absent if targets[name].requires_grad]
    all_names = _all_names(engine)
    # Experts are those of this rank in the model, and of all ranks in the checkpoint.
    experts = ".deepspeed_moe.experts."
    unknown = [name for name in contents.weights if name not in all_names and experts not in name]
    if strict and (needed or unknown):
        raise ConfigurationError(
            f"the parameters of the model are not those of the checkpoint ({contents.format}): it lacks "
            f"{_some(needed)}, and has {_some(unknown)} beyond; give load_module_strict=False to load the common ones."
        )


@torch.no_grad()
def fill_optimizer(engine: Any, contents: Contents) -> None:
    """Optimizer state, converted where another optimizer goes on than the one that saved. Every rank must call.

    Adam's first moment becomes the momentum of parameters that HyperMuon trains. A parameter that went from Muon to
    Adam starts fresh. What was taken is said on rank 0.

    Raises:
        ConfigurationError: The checkpoint has no state, or of an optimizer that has nothing in common.
    """
    optimizer = engine.basic_optimizer
    if optimizer is None:
        return
    if contents.optimizer is None:
        raise ConfigurationError(
            f"the checkpoint ({contents.format}) has weights and no optimizer state; load it with "
            "load_optimizer_states=False, or load_module_only=True."
        )
    ours = "muon" if isinstance(optimizer, HyperMuon) else "adam" if isinstance(optimizer, _ADAMS) else "other"
    if (ours == "other") != (contents.optimizer == "other"):
        raise ConfigurationError(
            f"the checkpoint ({contents.format}) has the state of {contents.optimizer_class or contents.optimizer}, "
            f"from which {type(optimizer).__name__} cannot go on; give load_optimizer_states=False."
        )
    converts = "muon" in (ours, contents.optimizer)
    if isinstance(optimizer, HyperMuon):
        optimizer.share_momentum()
    conversions: list[Conversion] = []
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            source = _find(engine, contents, names[id(parameter)], parameter)
            saved: Mapping[str, Any] = contents.state.get(source, {}) if source is not None else {}
            if converts and source is not None:
                saved = _converted(source, saved, group, contents, conversions)
            _fill_state(optimizer, parameter, group, saved)
    if isinstance(optimizer, HyperMuon):
        optimizer.plan_again()
    if converts:
        reporting.say(f"optimizer state from {contents.format}:")
        reporting.say(Imported({}, tuple(conversions), ()).summary())
    else:
        _fill_options(engine, contents, names)


def _converted(
    name: str, saved: Mapping[str, Any], group: Mapping[str, Any], contents: Contents, said: list[Conversion]
) -> dict[str, torch.Tensor]:
    """One parameter's state for the optimizer that goes on."""
    options = {k: v for k, v in (contents.group_of(name) or {}).items() if k not in ("params", "param_names")}
    origin = "hypermuon" if contents.optimizer_class == "HyperMuon" else "deepspeed"
    if "algorithm" not in options:
        options["algorithm"] = "muon" if "momentum_buffer" in saved else "adamw"
    values = {k: v.read() if isinstance(v, Stored) else torch.tensor(float(v)) for k, v in saved.items()}
    mine = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    found = import_state(
        {"state": {}, "param_groups": [{**mine, "params": [name]}]},
        Source(origin, {"state": {name: values}, "param_groups": [{**options, "params": [name]}]}),
    )
    said.extend(found.conversions)
    state: dict[str, torch.Tensor] = found.state_dict["state"][name]
    return state


def _fill_state(optimizer: Any, parameter: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    state = optimizer.state[parameter]
    if "momentum_buffer" in state and group.get("algorithm") == "muon":
        state["momentum_buffer"].zero_()
    else:
        state.clear()
    if group.get("algorithm") == "adamw" or (saved and isinstance(optimizer, HyperAdamW)):
        state.update(new_adamw_state(parameter, fused=bool(group.get("fused"))))
    for key, value in saved.items():
        tensor = value.read() if isinstance(value, Stored) else torch.as_tensor(value)
        if tensor.dim() == 0:
            mine = state.get(key)
            state[key] = tensor.to(torch.float32).to(mine.device) if mine is not None else tensor.to(torch.float32)
            continue
        if key not in state:
            state[key] = zeros_like_local(parameter)
        _check_shape(key, tuple(tensor.shape), parameter)
        write_full(state[key], tensor.to(state[key].dtype))


def _fill_options(engine: Any, contents: Contents, names: Mapping[int, str]) -> None:
    for group in engine.basic_optimizer.param_groups:
        source = next((_find(engine, contents, names[id(p)], p) for p in group["params"]), None)
        saved = contents.group_of(source) if source is not None else None
        if saved is not None:
            group.update({key: saved[key] for key in _OPTIONS if key in saved})


def _find(engine: Any, contents: Contents, name: str, parameter: torch.Tensor) -> str | None:
    """The name in the checkpoint of a parameter, by any of its names in the model."""
    found = contents.canonical(engine.experts.global_name(name))
    if found is not None:
        return found
    aliases = [n for n, p in engine.module.named_parameters(remove_duplicate=False) if p is parameter]
    return next((known for alias in aliases if (known := contents.canonical(alias)) is not None), None)


def _all_names(engine: Any) -> set[str]:
    names = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    return names | {name for name, _ in engine.module.named_buffers()}


def _check_shape(name: str, shape: tuple[int, ...], parameter: torch.Tensor) -> None:
    if shape != tuple(parameter.shape):
        raise ConfigurationError(
            f"{name} has the shape {shape} in the checkpoint and {tuple(parameter.shape)} in the model; was the model "
            "built with the same configuration?"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
