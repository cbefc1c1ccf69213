"""A small language model and its data, with nothing that depends on a framework."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, MICRO_BATCH = 61, 32, 16, 2


class Block(nn.Module):
    """Two linears around a non-linearity, with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class LanguageModel(nn.Module):
    """Embedding, blocks in a ModuleList, norm and head; returns the loss."""

    def __init__(self, layers: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_model(**options: bool | int) -> LanguageModel:
    """The same weights on every call."""
    torch.manual_seed(0)
    return LanguageModel(**options)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Tokens of one micro-batch of one rank: (MICRO_BATCH, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    start = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (MICRO_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
