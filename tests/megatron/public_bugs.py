"""Rank functions of `test_public_bugs.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.optimized import optimizer_config
from tests.megatron.wrapped import BATCH, LENGTH, VOCABULARY, backward, model, start, wrap

LEARNING_RATE = 0.125


def finalized(*, supernode_size: int) -> float:
    """Largest difference between a parameter's published gradient before and after Megatron's own finalization."""
    from megatron.core.distributed import finalize_model_grads

    start()
    chunk = wrap(model(), supernode_size=supernode_size)
    chunk.zero_grad_buffer()
    backward(chunk, no_sync=chunk.no_sync)
    before = {name: p.grad._local_tensor.clone() for name, p in chunk.named_parameters()}
    finalize_model_grads([chunk], None, force_all_reduce=False)
    return max((p.main_grad - before[name]).abs().max().item() for name, p in chunk.named_parameters() if p.numel())


def update_of_plain_sgd(*, supernode_size: int, micro_batches: int) -> dict[str, float]:
    """By parameter, how far a step of SGD is from the learning rate times the mean gradient of one process.

    Relative to the largest element of that update. One process sees the micro-batches of all ranks.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    start()
    plain = model()
    for rank in range(dist.get_world_size()):
        _backward_as(plain, rank, micro_batches)
    count = dist.get_world_size()
    expected = {name: p.grad * (LEARNING_RATE / count) for name, p in plain.named_parameters()}

    mine = model()
    before = {name: p.detach().clone() for name, p in mine.named_parameters()}
    chunk = wrap(mine, supernode_size=supernode_size)
    options: dict[str, Any] = dict(lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0, clip_grad=0.0)
    config = optimizer_config(optimizer="sgd", sgd_momentum=0.0, log_num_zeros_in_grad=False, **options)
    optimizer = build_optimizer(get_megatron_optimizer, config, [chunk])
    chunk.zero_grad_buffer()
    backward(chunk, no_sync=chunk.config.no_sync_func, micro_batches=micro_batches)
    chunk.finish_grad_sync()
    optimizer.step()
    found = {name: before[name] - p.full_tensor() for name, p in mine.named_parameters()}
    return {name: ((found[name] - update).abs().max() / update.abs().max()).item() for name, update in expected.items()}


def _backward_as(plain: Any, rank: int, micro_batches: int) -> None:
    """What `backward` does on `rank`, added to the gradients of a plain model."""
    generator = torch.Generator().manual_seed(100 + rank)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    for _ in range(micro_batches):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        plain(tokens, positions, None, labels=labels).mean().backward()
