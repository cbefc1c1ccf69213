"""Who needs the gradient of a parameter: all replicas, or the one whose optimizer updates it.

An optimizer that updates a parameter on one replica alone needs its gradient there and nowhere else. Summing it there
costs half the bytes of giving every replica the sum. The optimizer says so here, and what reduces gradients reads it.
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "_hyperfsdp_gradient_owner"


def allow_gradient_owner(parameter: torch.Tensor) -> None:
    """Says that whoever reduces the gradients of `parameter` heeds `set_gradient_owner`."""
    if not hasattr(parameter, _ATTRIBUTE):
        setattr(parameter, _ATTRIBUTE, None)


def allows_gradient_owner(parameter: torch.Tensor) -> bool:
    """Whether `set_gradient_owner` has an effect on `parameter`."""
    return hasattr(parameter, _ATTRIBUTE)


def set_gradient_owner(parameter: torch.Tensor, rank: int | None) -> None:
    """From the next backward on, leaves the gradient of `parameter` on one of the ranks that hold this shard of it.

    The `.grad` of the others is then None. Every rank that holds a part of the parameter must call, with owners of one
    replica.

    Args:
        parameter: One that allows it.
        rank: Global rank, one of those that hold the same shard as this rank; None: all of them get the gradient.
    """
    assert allows_gradient_owner(parameter)
    setattr(parameter, _ATTRIBUTE, rank)


def gradient_owner(parameter: torch.Tensor) -> int | None:
    """What `set_gradient_owner` said last; None where all replicas get the gradient."""
    owner: int | None = getattr(parameter, _ATTRIBUTE, None)
    return owner
