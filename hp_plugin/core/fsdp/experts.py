"""Experts of mixture layers, of which a rank holds some only: units on a mesh of their own.

Fewer ranks hold the same experts than hold the same attention. Megatron and DeepSpeed both mark the parameters of
experts with `allreduce = False`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hp_plugin.core.topology import Topology
from hp_plugin.errors import UnsupportedError


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether the gradient of `parameter` is reduced over expert-data-parallel ranks: another set of ranks."""
    return not getattr(parameter, "allreduce", True)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules inside `model` that hold expert parameters and no others: units on a mesh of their own.

    In a mixture layer that is the module `experts`, whichever class it has. In order of `modules()`.

    Raises:
        UnsupportedError: A module holds expert parameters and others itself, so that no module can be split off.
    """
    found: list[nn.Module] = []
    for child in model.children():
        marks = {is_expert(parameter) for parameter in child.parameters()}
        if marks == {True}:
            found.append(child)
        elif True in marks:
            found += expert_modules(child)
    taken = {id(parameter) for module in found for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if is_expert(parameter) and id(parameter) not in taken:
            raise UnsupportedError(
                f"{type(model).__name__} holds the expert parameter {name} beside others. HyperFSDP shards expert "
                "parameters by module; put them into a module that holds nothing else."
            )
    return found


def expert_reshard(value: bool | int, shard_size: int) -> bool | int:
    """`reshard_after_forward` of experts: with a number, as many groups as their smaller shard group can be cut into.

    Args:
        value: What was asked for, for groups of the size of the dense parameters' shard group.
        shard_size: Size of the experts' shard group.

    Returns:
        A bool, or the smallest divisor of `shard_size` that is at least `value`; so never more memory than asked for.
    """
    if isinstance(value, bool):
        return value
    return next((n for n in range(value, shard_size) if shard_size % n == 0), True)


def expert_shard_size(shard_size: Any, ranks: Sequence[int], topology: Topology) -> Any:
    """`shard_size` of experts: a number of ranks, as far as it divides what each supernode holds of their group.

    Args:
        shard_size: What was asked for dense parameters, as for `mesh_from_group`.
        ranks: The expert-data-parallel group, as global ranks.
        topology: Which ranks share a supernode.

    Returns:
        The same, or a smaller number.
    """
    if not isinstance(shard_size, int):
        return shard_size
    shares: dict[int, int] = {}
    for rank in ranks:
        supernode = topology.supernode_of[rank]
        shares[supernode] = shares.get(supernode, 0) + 1
    return math.gcd(shard_size, *shares.values())
