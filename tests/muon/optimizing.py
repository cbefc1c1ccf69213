"""Parameters, gradients and steps for tests of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.muon.reference import values

SHAPES = [(8, 6), (5, 12), (8, 6)]
OTHERS = [(7,), (9, 4), ()]


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in values(shapes, seed)]


def set_gradients(params: Sequence[nn.Parameter], seed: int) -> None:
    for param, value in zip(params, values([tuple(p.shape) for p in params], seed), strict=True):
        param.grad = value.to(param.dtype)


def trained(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        set_gradients(params, 10 + step)
        optimizer.step()
    return [param.detach().clone() for param in params]
