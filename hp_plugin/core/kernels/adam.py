"""AdamW on flat shards by a fused kernel, where the table has one; else the optimizer runs torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.operands import is_plain


class AdamShard(NamedTuple):
    """What a step of AdamW needs of one tensor, all of one shape and device.

    Attributes:
        param: The values; changed in place.
        grad: Their gradient.
        exp_avg: Running mean; changed in place.
        exp_avg_sq: Running mean of squares; changed in place.
        step: Number of steps taken, a 0-dim tensor; one is added.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class AdamOptions(NamedTuple):
    """Options of AdamW, by the names of `torch.optim.AdamW`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def fused_adamw(shards: Sequence[AdamShard], options: AdamOptions) -> list[AdamShard]:
    """Steps the shards that a fused kernel takes. Local: no rank communicates.

    Args:
        shards: Non-empty ones. Their step counters should be on the CPU: the kernels need the number.
        options: The same for all.

    Returns:
        Those that are still to be stepped, in order.
    """
    left: list[AdamShard] = []
    taken: dict[tuple[str, int], list[AdamShard]] = {}
    for shard in shards:
        implementation = _implementation(shard)
        if implementation == "torch":
            left.append(shard)
        else:
            taken.setdefault((implementation, int(shard.step) + 1), []).append(shard)
    for (implementation, step), members in taken.items():
        for shard in members:
            shard.step.add_(1)
        _run(implementation, members, options, step)
    return left


def adamw_reference(shard: AdamShard, options: AdamOptions) -> None:
    """One step of AdamW in float64, rounded once per tensor: the oracle of the fused kernels."""
    (beta1, beta2), step = options.betas, float(shard.step) + 1
    with torch.no_grad():
        shard.step.add_(1)
        grad = shard.grad.double()
        exp_avg = shard.exp_avg.double() * beta1 + grad * (1 - beta1)
        exp_avg_sq = shard.exp_avg_sq.double() * beta2 + grad * grad * (1 - beta2)
        denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + options.eps
        param = shard.param.double() * (1 - options.lr * options.weight_decay)
        shard.param.copy_(param - options.lr / (1 - beta1**step) * exp_avg / denominator)
        shard.exp_avg.copy_(exp_avg)
        shard.exp_avg_sq.copy_(exp_avg_sq)


def _implementation(shard: AdamShard) -> str:
    found = table.kernels().choose("adamw_", shard.param.device.type, shard.param.dtype)
    if found == "torch":  # first, since it is what the CPU asks at every step
        return found
    operands = shard[:4]
    if not all(is_plain(tensor) for tensor in operands) or shard.step.device.type != "cpu":
        return "torch"
    if found == "triton":
        return found
    if any(tensor.dtype != shard.param.dtype for tensor in operands):
        return "torch"  # the vendors' kernels read all four as one dtype
    if found == "npu":
        from hp_plugin.core.kernels import npu

        return found if "npu_apply_adam_w" in npu.operators() else "torch"
    return found


def _run(implementation: str, shards: Sequence[AdamShard], options: AdamOptions, step: int) -> None:
    if implementation == "apex":
        from hp_plugin.core.kernels import apex

        apex.adamw_(shards, options, step)
        return
    for shard in shards:
        if implementation == "npu":
            from hp_plugin.core.kernels import npu

            npu.adamw_(shard, options, step)
        else:
            from hp_plugin.core.kernels.triton_kernels import launch

            launch.adamw_(*shard[:4], step=step, **options._asdict())
