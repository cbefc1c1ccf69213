"""The benchmark's model: llama-like layers of nine tensors, so small that their arithmetic hardly counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its input.

    Attributes:
        layers: Number of layers, each one FSDP unit.
        dim: Width. Every matrix is `dim` x `dim` but those of the MLP, which are `dim` x 2 `dim`.
        heads: Attention heads.
        tokens: Length of the one sequence of the batch.
    """

    layers: int = 8
    dim: int = 16
    heads: int = 2
    tokens: int = 2


class Norm(nn.Module):
    """A norm with one weight and one kernel, as RMSNorm has on accelerators; torch's CPU RMSNorm is a dozen kernels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dim of `x`."""
        return F.layer_norm(x, self.weight.shape, self.weight)


class Layer(nn.Module):
    """Pre-norm attention and gated MLP: nine parameters, two of them vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim, hidden = size.dim, 2 * size.dim
        self.heads = size.heads
        self.attention_norm = Norm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = Norm(dim)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape."""
        batch, tokens, dim = x.shape
        normed = self.attention_norm(x)
        split = (batch, tokens, self.heads, dim // self.heads)
        q, k, v = (w(normed).view(split).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, tokens, dim))
        normed = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Stack(nn.Module):
    """The layers one after another, and no parameter of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (1, tokens, dim) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def make_model(size: Size, *, seed: int = 0) -> Stack:
    """A `Stack` in fp32, with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(size)
