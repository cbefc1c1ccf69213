"""A small GPT over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bench.convergence.data import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step.

    Attributes:
        layers: Blocks, each one FSDP unit; the rest is the root unit.
        dim: Width.
        heads: Attention heads.
        length: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a rank in a step.
    """

    layers: int = 2
    dim: int = 64
    heads: int = 4
    length: int = 64
    batch: int = 4
    micro_batches: int = 2


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.dim
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `x` of shape (batch, length, dim) to the same shape."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Byte and position embeddings, blocks, norm, head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.dim)
        self.positions = nn.Embedding(size.length, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy (fp32, 0-dim) of `targets` given `tokens`, int64 (batch, length) each."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_model(size: Size) -> GPT:
    """The model in fp32 with GPT-2's initial weights, the same on every rank and in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4321)
        model = GPT(size)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
