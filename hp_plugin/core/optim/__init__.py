"""Optimizers and gradient clipping that work on local shards."""

from __future__ import annotations

from hp_plugin.core.optim.adamw import HyperAdamW
from hp_plugin.core.optim.clip import clip_grad_norm_, clip_grads_with_norm_, total_grad_norm

__all__ = ["HyperAdamW", "clip_grad_norm_", "clip_grads_with_norm_", "total_grad_norm"]
