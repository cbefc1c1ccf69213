"""Rank functions around a model under context parallelism whose attention does not communicate.

Stock Megatron has no context-parallel attention on CPU. What data parallelism has to do with it can be seen without
one: which ranks share parameters and reduce gradients, and by what they divide them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.optimized import optimizer_config, take_steps
from tests.megatron.wrapped import backward, model, start, wrap

STEPS = 3


def gradients(*, supernode_size: int, per_token: bool) -> dict[str, float]:
    """By parameter, the largest difference of a gradient to that of one process, relative to its largest element."""
    start(context_parallel=2)
    whole = model(per_token=per_token)
    for rank in range(dist.get_world_size()):
        backward(whole, no_sync=nullcontext, rank=rank)
    divisor = 1 if per_token else dist.get_world_size()
    mine = model(per_token=per_token, context_parallel_size=2)
    chunk = wrap(mine, supernode_size=supernode_size)
    backward(chunk, no_sync=chunk.no_sync)
    chunk.finish_grad_sync()
    expected = dict(whole.named_parameters())
    differences = {}
    for name, parameter in mine.named_parameters():
        gradient = expected[name].grad / divisor
        differences[name] = ((parameter.grad.full_tensor() - gradient).abs().max() / gradient.abs().max()).item()
    return differences


def mesh(*, supernode_size: int) -> tuple[list[list[int]], int]:
    """The ranks of the mesh, and the size of the data-parallel group without context parallelism."""
    from megatron.core import parallel_state

    start(context_parallel=2)
    chunk = wrap(model(context_parallel_size=2), supernode_size=supernode_size)
    return chunk.mesh.mesh.tolist(), parallel_state.get_data_parallel_world_size()


def steps(*, supernode_size: int) -> dict[str, float]:
    """Largest relative differences of norms and weights after three steps to one process."""
    from megatron.core.optimizer import get_megatron_optimizer

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    start(context_parallel=2)
    whole = model()
    groups = [[p for p in whole.parameters() if p.dim() > 1], [p for p in whole.parameters() if p.dim() == 1]]
    config = optimizer_config()
    theirs = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    expected = [_step(whole, theirs, config.clip_grad) for _ in range(STEPS)]

    chunk = wrap(model(context_parallel_size=2), supernode_size=supernode_size)
    mine = build_optimizer(get_megatron_optimizer, config, [chunk])
    for group in mine.param_groups:  # as Megatron's scheduler sets them
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    found = [norm for _, norm, _ in take_steps(chunk, mine, steps=STEPS)]
    weights = dict(whole.named_parameters())
    return {
        "norm": max(abs(b - a) / a for a, b in zip(expected, found, strict=True)),
        "smallest norm": min(expected),
        "weight": max(_difference(p.full_tensor(), weights[n].detach()) for n, p in chunk.module.named_parameters()),
    }


def _step(whole: Any, optimizer: torch.optim.Optimizer, clip_grad: float) -> float:
    """One step in one process, on what all ranks see. Returns the norm before clipping."""
    optimizer.zero_grad()
    for rank in range(dist.get_world_size()):
        backward(whole, no_sync=nullcontext, rank=rank)
    for parameter in whole.parameters():
        parameter.grad /= dist.get_world_size()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), clip_grad).item()
    optimizer.step()
    return norm


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()
