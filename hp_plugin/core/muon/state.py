"""The state of `HyperMuon`: checks, loading, and which rank keeps the momentum of what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.muon.plan import ExchangePlan
from hp_plugin.errors import ConfigurationError, UnsupportedError


class OwnerPlaced(NamedTuple):
    """A parameter whose momentum is kept by one replica of several.

    Attributes:
        parameter: Its index in the plan.
        owner: The global rank that keeps the momentum of this rank's shard.
        holders: The ranks that hold this shard, ascending.
    """

    parameter: int
    owner: int
    holders: tuple[int, ...]


def owner_placed(plan: ExchangePlan, rank: int) -> list[OwnerPlaced]:
    """The parameters of a plan whose momentum is on one replica of several, as `rank` sees them."""
    replicas = {block.parameter: block.replica for wave in plan.waves for block in wave.blocks}
    found = []
    for index, parameter in enumerate(plan.parameters):
        shards = parameter.shards(rank)
        if parameter.in_one_replica and len(shards) > 1:
            holders = next(column for column in zip(*shards, strict=True) if rank in column)
            found.append(OwnerPlaced(index, holders[replicas[index]], tuple(sorted(holders))))
    return found


def check_matrix(name: str, parameter: Tensor) -> None:
    """Raises UnsupportedError for a parameter that Muon cannot take."""
    if parameter.ndim < 2:
        raise UnsupportedError(
            f"parameter {name} of shape {tuple(parameter.shape)} is no matrix, and Muon orthogonalizes matrices: put "
            'it into a group with "algorithm": "adamw", or give HyperMuon the model, which routes its parameters'
        )
    if not parameter.is_floating_point():
        raise UnsupportedError(f"parameter {name} has the dtype {parameter.dtype}; Muon needs a real floating dtype")
    if not local_tensor(parameter).is_contiguous():
        raise UnsupportedError(
            f"parameter {name} of shape {tuple(parameter.shape)} is not contiguous (channels_last?), and Muon reads it "
            "as rows and columns: keep its memory in the default format, or give it to AdamW"
        )


def load_into(state: dict[str, Any], saved: Mapping[str, Any], *, shape: tuple[int, ...]) -> None:
    """Loads the state of a parameter in place, in the dtypes that it has here.

    Args:
        state: Of the parameter.
        saved: What a state dict has of it; nothing leaves it as it is.
        shape: Of the parameter, for messages.

    Raises:
        ConfigurationError: An entry is unknown, or this rank's part of it has another shape.
    """
    for name, value in saved.items():
        mine = state.get(name)
        if mine is None:
            raise ConfigurationError(
                f"the loaded state of a parameter of shape {shape} has {name}, which is unknown here: there is "
                f"{', '.join(state)}"
            )
        if not isinstance(value, Tensor):
            state[name] = torch.as_tensor(value, dtype=mine.dtype, device=mine.device)
            continue
        target, source = local_tensor(mine), local_tensor(value)
        if target.shape != source.shape:
            raise ConfigurationError(
                f"the loaded {name} of a parameter of shape {shape} has the local shape {tuple(source.shape)}, but "
                f"this rank holds {tuple(target.shape)}; load across meshes with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
        target.copy_(source)
