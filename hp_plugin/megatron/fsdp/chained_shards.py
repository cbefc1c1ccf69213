"""Several `ShardOptimizer`s as one: those of dense and of expert parameters, which live on different meshes.

A subclass of Megatron's `ChainedOptimizer`, whose checkpoint format and groups it keeps. Norm, clipping and loss scale
are those of the whole model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from hp_plugin.megatron.checkpoints import optimizer_parts
from hp_plugin.megatron.fsdp.shard_optimizer import ShardOptimizer, take_step


class ChainedShardOptimizer(ChainedOptimizer):
    """Optimizers of the parts of one model, stepped together.

    Args:
        parts: The optimizers, at least one, with one configuration. They have the loss scale of the first from now on.
    """

    def __init__(self, parts: list[ShardOptimizer]) -> None:
        super().__init__(parts)
        self.parts = parts
        self.grad_scaler = parts[0].grad_scaler
        for number, part in enumerate(parts):
            part.grad_scaler = self.grad_scaler
            part.chain_prefix = f"chained_{number}." if len(parts) > 1 else ""
        self.grad_norms_by_group: dict[str, float] = {}
        self.separate_norms = sorted({name for part in parts for name in part.separate_norms})

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """As :meth:`ShardOptimizer.prepare_grads`: an overflow in one part is one of the whole model."""
        if self.grad_scaler is None:
            return False
        found = [part.unscale() for part in self.parts]  # all of them, since every rank takes part in each
        found_inf = any(found)
        self.grad_scaler.update(found_inf)
        return found_inf

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """2-norm of the gradients of the whole model. Every rank must call."""
        return self.norm_of(None)

    @torch.no_grad()
    def norm_of(self, group: str | None) -> float:
        """As :meth:`ShardOptimizer.norm_of`."""
        return math.sqrt(sum(part.norm_of(group) ** 2 for part in self.parts))

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Number of zeros in the gradients of the whole model. Every rank must call."""
        return sum(part.count_zeros() for part in self.parts)

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """As :meth:`ShardOptimizer.clip_grad_norm`: all parts are scaled by one factor."""
        norm = self.norm_of(None)
        self._compute_grad_norms_by_group()
        if clip_grad > 0.0:
            for part in self.parts:
                part.clip_to({**self.grad_norms_by_group, None: norm}, clip_grad)
        return norm

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """As :meth:`ShardOptimizer.step`."""
        return take_step(self)

    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        self.grad_norms_by_group = {group: self.norm_of(group) for group in self.separate_norms}
        return self.grad_norms_by_group

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what a checkpoint delivered for `sharded_state_dict`, in however many parts it was saved."""
        for part, state in zip(self.parts, optimizer_parts.split(state_dict, len(self.parts))):
            part.load_state_dict(state)

    def offload_to_cpu(self) -> Any:
        """Refused, by the parts."""
        return self.parts[0].offload_to_cpu()

    restore_from_cpu = offload_to_cpu
