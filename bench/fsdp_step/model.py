"""The model that every variant trains: a small pre-norm transformer, computed or modelled.

Blocks hold their parameters themselves, not in submodules, because the modelled block calls no submodule and some peers
hook the module that owns a parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.fsdp_step.pace import Pace, wait_until
from bench.fsdp_step.settings import Size

_ATTENTION_SHARE = 1 / 3  # of a block's work and parameters; the MLP has the rest
_GRADIENT_SCALE = 1e-3


class _ModelledWork(torch.autograd.Function):
    """Takes its time forward and twice that backward; gradients are real writes: weights times a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace, share: float, *weights: torch.Tensor) -> torch.Tensor:
        deadline = pace.begin(share)
        ctx.pace, ctx.share, ctx.weights = pace, share, weights
        y = x * 1.0
        wait_until(deadline)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        deadline = ctx.pace.begin(2 * ctx.share)
        # An accelerator writes gradients as a part of its work, so the writes lie inside the wait.
        gradients = [weight.detach() * _GRADIENT_SCALE for weight in ctx.weights]
        wait_until(deadline)
        return (gradient, None, None, *gradients)


class Attention(nn.Module):
    """Pre-norm causal attention with its residual: (batch, tokens, dim) to the same shape."""

    def __init__(self, size: Size, pace: Pace | None) -> None:
        super().__init__()
        self.heads, self.pace = size.heads, pace
        self.norm = nn.Parameter(torch.ones(size.dim))
        self.qkv = _matrix(3 * size.dim, size.dim)
        self.out = _matrix(size.dim, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes, or waits as long as an accelerator would."""
        if self.pace is not None:
            y: torch.Tensor = _ModelledWork.apply(x, self.pace, _ATTENTION_SHARE, *self.parameters())
            return y
        batch, tokens, dim = x.shape
        normed = F.layer_norm(x, (dim,), self.norm)
        split = F.linear(normed, self.qkv).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.linear(attended.transpose(1, 2).reshape(batch, tokens, dim), self.out)


class MLP(nn.Module):
    """Pre-norm MLP with its residual: (batch, tokens, dim) to the same shape."""

    def __init__(self, size: Size, pace: Pace | None) -> None:
        super().__init__()
        self.pace = pace
        self.norm = nn.Parameter(torch.ones(size.dim))
        self.up = _matrix(4 * size.dim, size.dim)
        self.down = _matrix(size.dim, 4 * size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes, or waits as long as an accelerator would."""
        if self.pace is not None:
            y: torch.Tensor = _ModelledWork.apply(x, self.pace, 1 - _ATTENTION_SHARE, *self.parameters())
            return y
        normed = F.layer_norm(x, x.shape[-1:], self.norm)
        return x + F.linear(F.gelu(F.linear(normed, self.up)), self.down)


class Block(nn.Module):
    """One layer: attention, then MLP."""

    def __init__(self, size: Size, pace: Pace | None) -> None:
        super().__init__()
        self.attention = Attention(size, pace)
        self.mlp = MLP(size, pace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, dim) to the same shape."""
        y: torch.Tensor = self.mlp(self.attention(x))
        return y


class Head(nn.Module):
    """Norm and projection to the vocabulary; always computed."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(size.dim))
        self.weight = _matrix(size.vocabulary, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, dim) to (batch, tokens, vocabulary)."""
        return F.linear(F.layer_norm(x, x.shape[-1:], self.norm), self.weight)


class Transformer(nn.Module):
    """Embedding (not tied to the head), blocks, head.

    Args:
        size: sizes.
        pace: the modelled accelerator that blocks wait for; None: blocks compute.
    """

    def __init__(self, size: Size, pace: Pace | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(Block(size, pace) for _ in range(size.layers))
        self.head = Head(size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits

    @property
    def units(self) -> list[nn.Module]:
        """The modules that become FSDP units, in the order of forward."""
        return [self.embedding, *self.blocks, self.head]


def make_model(size: Size, pace: Pace | None, *, seed: int) -> Transformer:
    """The model in fp32, with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(size, pace)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits (batch, tokens, vocabulary) and ids (batch, tokens): a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batches(size: Size, *, rank: int, seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random (tokens, targets), each (1, tokens), different on every rank."""
    generator = torch.Generator().manual_seed(seed + 1000 * (rank + 1))
    drawn = [torch.randint(0, size.vocabulary, (1, size.tokens + 1), generator=generator) for _ in range(count)]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in drawn]


def unit_sizes(size: Size) -> list[int]:
    """Elements of every unit, in the order of forward."""
    with torch.device("meta"):
        units = Transformer(size, None).units
    return [sum(p.numel() for p in unit.parameters()) for unit in units]


def _matrix(rows: int, columns: int) -> nn.Parameter:
    weight = torch.empty(rows, columns)
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.02)
    return nn.Parameter(weight)
