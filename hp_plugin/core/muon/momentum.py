"""Momentum of one shard: elementwise, so a shard gives the bits of the same part of the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

MomentumKind = Literal["ema", "heavy_ball"]
"""ema: buffer = mu * buffer + (1 - mu) * gradient, as in torch.optim.Muon. heavy_ball: buffer = mu * buffer + gradient.
Both lead in the same direction; the buffers differ by the factor 1 - mu."""


def advance(buffer: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Takes a gradient into the buffer.

    Args:
        buffer: The momentum, any shape; changed in place.
        gradient: Of the same shape, any floating dtype.
        options: `momentum`, `nesterov` and `momentum_kind` of the parameter group.

    Returns:
        What is to be orthogonalized, in the dtype of the buffer. Without Nesterov it is the buffer itself.
    """
    momentum = options["momentum"]
    gradient = gradient.to(buffer.dtype)
    if options["momentum_kind"] == "ema":
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if options["nesterov"] else buffer
    buffer.mul_(momentum).add_(gradient)
    return gradient.add(buffer, alpha=momentum) if options["nesterov"] else buffer


def look_ahead_without_gradient(buffer: Tensor, options: Mapping[str, Any]) -> Tensor:
    """What `advance` would return for a gradient of zeros; the buffer stays as it is."""
    momentum = options["momentum"]
    return buffer * (momentum * momentum if options["nesterov"] else momentum)
