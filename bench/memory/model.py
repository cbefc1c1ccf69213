"""A model of which nearly every byte is a parameter: wide blocks, a handful of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its input.

    Attributes:
        blocks: Number of blocks, each one FSDP unit.
        dim: Width; a block has `8 * dim * dim + dim` parameters.
        vocabulary: Rows of the embedding, which with the last norm makes the root unit.
        tokens: Tokens of a micro-batch.
    """

    blocks: int = 8
    dim: int = 192
    vocabulary: int = 256
    tokens: int = 4


class Norm(nn.Module):
    """Layer norm without a bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dim of `x`."""
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    """Pre-norm MLP with a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = Norm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (tokens, dim) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.blocks))
        self.norm = Norm(size.dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps `tokens` of shape (tokens,), int64, to a scalar loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def make_model(size: Size) -> Model:
    """The model in fp32, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(size)


def units(size: Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each parameter: of the root unit, and of a block."""
    dim = size.dim
    return (size.vocabulary * dim, dim), (dim, 4 * dim * dim, 4 * dim * dim)
