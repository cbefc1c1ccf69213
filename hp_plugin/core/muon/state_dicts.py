"""State dicts of optimizers: whose state an entry is, and how its tensors are placed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import Layout
from hp_plugin.errors import ConfigurationError, UnsupportedError

StateDict = Mapping[str, Any]


def named_keys(state_dict: StateDict, names: Sequence[str] | None) -> dict[Hashable, tuple[str, Mapping[str, Any]]]:
    """By key of the state: the parameter's name and its group.

    Args:
        state_dict: Nested, keyed by index or by name.
        names: In the order of the indices; None if the state dict has names.
    """
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise ConfigurationError(f'a state dict has "state" and "param_groups"; this has {sorted(state_dict)}.')
    groups = state_dict["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if names is not None and len(names) != count:
        raise ConfigurationError(f"{len(names)} names are given for a state dict of {count} parameters.")
    keys: dict[Hashable, tuple[str, Mapping[str, Any]]] = {}
    for group in groups:
        own = group.get("param_names")
        for position, key in enumerate(group["params"]):
            if isinstance(key, str):
                name = key
            elif names is not None:
                name = names[key]
            elif own is not None:
                name = own[position]
            else:
                raise ConfigurationError(
                    "a state dict is keyed by index and has no names; give names=[...] in the order of the indices, or "
                    "build the optimizer from named parameters."
                )
            keys[key] = (name, group)
    return keys


def nested(state_dict: StateDict) -> StateDict:
    """Undoes the flattening of `get_optimizer_state_dict(flatten_optimizer_state_dict=True)`."""
    if "state" in state_dict or not any(key.startswith("state.") for key in state_dict):
        return state_dict
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in state_dict.items():
        kind, _, rest = key.partition(".")
        name, _, leaf = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[leaf] = value
    groups = [{**options.get(name, {}), "params": [name]} for name in dict.fromkeys([*options, *state])]
    return {"state": state, "param_groups": groups}


def placed(name: str, key: str, value: Any, template: Any) -> Any:
    """`value` placed as the target's own tensor is, where that exists."""
    if not isinstance(value, torch.Tensor) or not isinstance(template, torch.Tensor) or template.dim() == 0:
        return value
    if value.shape != template.shape:
        flat = " It is a flat buffer, as ZeRO keeps; cut it with unflatten()." if value.dim() == 1 else ""
        error = UnsupportedError if flat else ConfigurationError
        raise error(f"{key} of {name} has the shape {tuple(value.shape)}, not {tuple(template.shape)}.{flat}")
    if isinstance(value, DTensor):
        same = isinstance(template, DTensor) and (value.device_mesh, value.placements) == (
            template.device_mesh,
            template.placements,
        )
        if not same:
            raise ConfigurationError(
                f"{key} of {name} is placed as {value.placements} on {value.device_mesh}, the target's otherwise. Load "
                "the source with torch.distributed.checkpoint into a state dict of the target's placements."
            )
        return value
    return _shard_like(value, template) if isinstance(template, DTensor) else value


def _shard_like(value: torch.Tensor, template: DTensor) -> DTensor:
    """This rank's part of a whole tensor. No communication: the caller has the whole tensor on every rank."""
    coordinate = template.device_mesh.get_coordinate()
    layout = Layout.from_dtensor(template)
    local = value
    for dim in range(value.dim()):
        segments = layout.local_segments(coordinate, dim) if coordinate is not None else ()
        parts = [local.narrow(dim, start, length) for start, length in segments]
        local = torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.contiguous().to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )
