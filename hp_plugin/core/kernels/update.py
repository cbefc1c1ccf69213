"""Muon's last step on a shard: decay of the weights and the update, from where the message has it."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.operands import is_floating_matrix, share_memory


def decay_update_(target: Tensor, values: Tensor, decay: float, step: float, *, exact: bool = False) -> None:
    """``target = decay * target + step * values``, in place. Local: no rank communicates. Not recorded by autograd.

    Args:
        target: Floating-point tensor, strided in any way.
        values: Of the same shape, on the same device, of any floating dtype and strides.
        decay: Factor of the target.
        step: Factor of the values.
        exact: Round after the decay and after the update, as the reference does; a fused kernel rounds once.
    """
    chosen = "torch" if exact else table.kernels().choose("decay_update_", target.device.type, target.dtype)
    if chosen == "triton" and values.ndim == 2 and values.stride(1) != 1:
        values = values.contiguous()  # a tall matrix comes out of Newton-Schulz transposed
    fits = chosen == "triton" and target.shape == values.shape
    if fits and is_floating_matrix(target) and is_floating_matrix(values) and not share_memory(target, values):
        from hp_plugin.core.kernels.triton_kernels import launch

        launch.decay_update_(target, values, decay, step)
    else:
        decay_update_reference(target, values, decay, step)


def decay_update_reference(target: Tensor, values: Tensor, decay: float, step: float) -> None:
    """The torch implementation of `decay_update_`: the operations of `torch.optim.Muon`, for every tensor."""
    with torch.no_grad():
        if decay != 1.0:
            target.mul_(decay)
        target.add_(values, alpha=step)
