"""Small models with awkward shapes, and their data.

Every first dimension is odd, so that no parameter divides evenly among 2 or 4 ranks. The attention projection has no
bias: the gradient of a key bias is zero but for rounding, which Adam would blow up to a full step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 37
SEQUENCE = 11
WIDTH = 33
HEADS = 3
HIDDEN = 45
GLOBAL_BATCH = 12  # divides by 4 ranks x 3 micro-batches


class Attention(nn.Module):
    """Causal self-attention: (batch, sequence, width) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        heads = self.qkv(x).view(batch, sequence, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, WIDTH))


class Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Three-layer language model: int64 tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def units(self) -> list[nn.Module]:
        """The modules that become units of their own; the rest belongs to the root."""
        return list(self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TinyMLP(nn.Module):
    """Parameters of 1 to 7 rows, fewer than ranks among them: float32 (batch, 7) -> (batch, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)])
        self.scale = nn.Parameter(torch.ones(1))

    def units(self) -> list[nn.Module]:
        """The modules that become units of their own; the rest belongs to the root."""
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "tied": lambda: Transformer(tied=True),
    "mlp": TinyMLP,
}


def make_model(name: str) -> nn.Module:
    """The model `name` with the same initial float32 weights on every rank and in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return MODELS[name]()


def micro_batch(
    name: str, *, step: int, index: int, count: int, share: int = 0, shares: int = 1
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one micro-batch on one data-parallel rank.

    Micro-batch `index` of `count` is the same part of the global batch of `step` however many ranks share it.

    Args:
        name: model name.
        step: training step; each has its own data.
        index: micro-batch.
        count: micro-batches per step.
        share: data-parallel rank.
        shares: number of data-parallel ranks.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "mlp":
        inputs = torch.randn(GLOBAL_BATCH, 7, generator=generator)
        targets = torch.randn(GLOBAL_BATCH, 1, generator=generator)
    else:
        tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    rows = GLOBAL_BATCH // count // shares
    start = index * (GLOBAL_BATCH // count) + share * rows
    return inputs[start : start + rows], targets[start : start + rows]


def loss_of(name: str, output: Tensor, target: Tensor) -> Tensor:
    """Mean loss of a micro-batch, computed in float32."""
    if name == "mlp":
        return F.mse_loss(output.float(), target)
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())
