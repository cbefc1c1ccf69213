"""The model of the keys on sharding plans: llama-like layers, attention and MLP as modules of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.host_overhead.model import Norm, Size

PLAN_SIZE = Size(layers=8, dim=64, heads=8, tokens=8)
"""Every matrix and the sequence are divided by 8 ranks; what is left of each on a rank hardly counts."""


class Attention(nn.Module):
    """Four products. The number of heads follows from their width, so that they may be divided."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size.dim, size.dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape; divided over heads, to a summand of it."""
        batch, tokens, _ = x.shape
        split = (batch, tokens, -1, self.head_dim)
        q, k, v = (w(x).view(split).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """Three products."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.dim, 2 * size.dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * size.dim, size.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape; divided, to a summand of it."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A pre-norm layer of nine parameters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(size.dim), Norm(size.dim)
        self.attention, self.mlp = Attention(size), MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Blocks(nn.Module):
    """The layers one after another. The stream that enters is already divided under sequence parallelism."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def make_blocks(size: Size, *, seed: int = 0) -> Blocks:
    """`Blocks` in fp32, with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Blocks(size)
