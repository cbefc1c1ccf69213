"""Models for the public bugs: gradients in closed form, and towers with parameters large enough to travel alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hp_plugin import fully_shard


class Tap(nn.Module):
    """Adds `sum(weight * x)` to a running total: the gradient of `weight` is `x`, exactly."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, total: Tensor, x: Tensor) -> Tensor:
        return total + (self.weight * x).sum()


class Taps(nn.Module):
    """`depth` taps in a row, float (numel,) -> (): every weight's gradient is the input, that of `start` is 1."""

    def __init__(self, depth: int, numel: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1))
        self.taps = nn.ModuleList([Tap(numel) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        total = self.start
        for tap in self.taps:
            total = tap(total, x)
        return total.sum()


class Layer(nn.Module):
    """A norm, a square projection and its bias: float (rows, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Tower(nn.Module):
    """`depth` layers and a head: float (rows, width) -> (). `checkpointing` is as in `torch.utils.checkpoint`."""

    def __init__(self, depth: int, width: int, *, checkpointing: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "pairs":
            for i in range(0, len(self.layers), 2):
                x = checkpoint(nn.Sequential(*self.layers[i : i + 2]), x, use_reentrant=False)
        for layer in self.layers if self.checkpointing != "pairs" else ():
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        return F.mse_loss(self.head(x).float(), torch.ones(len(x), 3))


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """One unit per layer or tap, and the root; `options` go to every `fully_shard`."""
    for module in model.taps if isinstance(model, Taps) else model.layers:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
