"""The compute floor: the same compute, the optimizer on one rank's share, no communication."""

from __future__ import annotations

import torch
from torch import nn

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant, take_options


class Floor(Variant):
    """Trains nothing: its gradients are computed and dropped, its optimizer steps a stand-in of the share's size."""

    def __init__(self, context: Context) -> None:
        self.module = context.model()
        elements = sum(p.numel() for p in self.module.parameters())
        self._share = nn.Parameter(torch.zeros(elements // int(context.mesh.size(1))))
        self._share.grad = torch.zeros_like(self._share)
        self.optimizer = context.adamw([self._share])

    def update(self) -> None:
        """Steps the stand-in and drops the gradients."""
        self.optimizer.step()
        self.module.zero_grad()

    def local_gradients(self) -> list[torch.Tensor]:
        """Those of this rank's batch alone: they are not reduced."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]


def build_floor(context: Context, options: Options) -> Variant:
    """The floor; it has no options."""
    take_options("floor", options)
    return Floor(context)
