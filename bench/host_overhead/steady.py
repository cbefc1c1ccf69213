"""DTensors built in a steady training step, with and without accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

import hp_plugin
from bench.host_overhead.dtensors import DTensorCount, count_dtensors
from bench.host_overhead.variants import Variant

MODES: dict[str, str] = {
    "dtensors_one_batch": "",
    "dtensors_all_reduce_last": "set_requires_all_reduce",
    "dtensors_sync_last": "set_requires_gradient_sync",
}
"""Column of the report -> the method that keeps the first two of three micro-batches from being reduced (none: one
micro-batch)."""

_WARM_UP_STEPS = 2


def dtensors_of_a_step(variant: Variant, model: nn.Module, x: torch.Tensor, *, mode: str) -> DTensorCount:
    """Trains until nothing is new any more and counts in one step after that.

    A step is forward and backward of its micro-batches, clipping, the optimizer and clearing the gradients, with
    HyperAdamW and our clipping for our engine and torch's own for the others.

    Args:
        variant: What `model` is.
        model: The model.
        x: Its input.
        mode: Key of `MODES`.
    """
    ours = variant.engine == "ours"
    optimizer: torch.optim.Optimizer
    optimizer = (hp_plugin.HyperAdamW if ours else torch.optim.AdamW)(model.parameters(), lr=1e-4)
    clip: Callable[..., Any] = hp_plugin.clip_grad_norm_ if ours else torch_clip_grad_norm_
    for _ in range(_WARM_UP_STEPS):
        _step(model, x, optimizer, clip, MODES[mode])
    with count_dtensors() as count:
        _step(model, x, optimizer, clip, MODES[mode])
    return count


def _step(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, clip: Callable[..., Any], setter: str
) -> None:
    micro_batches = 3 if setter else 1
    for index in range(micro_batches):
        if setter:
            getattr(model, setter)(index == micro_batches - 1)
        model(x).sum().backward()
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
