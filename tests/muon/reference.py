"""Muon in one process, spelled out: the oracle of these tests, also where torch has no `torch.optim.Muon`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_plugin.core.muon.blocks import Block, Split
from hp_plugin.core.muon.splits import blocks_of

HAS_TORCH_MUON = hasattr(torch.optim, "Muon")
needs_torch_muon = pytest.mark.skipif(not HAS_TORCH_MUON, reason="this torch has no torch.optim.Muon")


def newton_schulz(matrix: Tensor) -> Tensor:
    """The operations of torch.optim.Muon with its defaults, in their order."""
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def rolled(matrix: Tensor) -> Tensor:
    """Every element moves on by a row and a column: exact, and it shows which element lay where."""
    return matrix.roll((1, 1), (-2, -1))


class ReferenceMuon:
    """Steps whole tensors.

    Args:
        weights: Changed in place by `step`.
        splits: How each is cut into matrices; None is whole.
        orthogonalize: (m, n) -> (m, n).
        heavy_ball: Whether the buffer is mu * buffer + gradient.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        splits: Sequence[Split | None] | None = None,
        orthogonalize: Callable[[Tensor], Tensor] = newton_schulz,
        heavy_ball: bool = False,
    ) -> None:
        self.weights, self.lr, self.momentum, self.nesterov = list(weights), lr, momentum, nesterov
        self.weight_decay, self.orthogonalize, self.heavy_ball = weight_decay, orthogonalize, heavy_ball
        self.buffers = [torch.zeros_like(weight) for weight in weights]
        cuts = splits if splits is not None else [None] * len(self.weights)
        self.cuts = [blocks_of("reference", w.shape, split) for w, split in zip(self.weights, cuts, strict=True)]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        mu = self.momentum
        for weight, buffer, gradient, (view, blocks) in zip(
            self.weights, self.buffers, gradients, self.cuts, strict=True
        ):
            if gradient is None:
                continue
            if self.heavy_ball:
                buffer.mul_(mu).add_(gradient)
                update = gradient.add(buffer, alpha=mu) if self.nesterov else buffer
            else:
                buffer.lerp_(gradient, 1 - mu)
                update = gradient.lerp(buffer, mu) if self.nesterov else buffer
            weight.mul_(1 - self.lr * self.weight_decay)
            shape = (view.depth, view.rows, view.cols)
            for block in blocks:
                where = indices_of(block)
                values = weight.view(shape)[where]
                m, n = block.shape
                direction = self.orthogonalize(update.reshape(shape)[where])
                weight.view(shape)[where] = values.add(direction, alpha=-self.lr * max(1.0, m / n) ** 0.5)


def indices_of(block: Block) -> tuple[int, Tensor, Tensor]:
    """An index of a stack of matrices that takes the block."""
    rows, cols = (
        torch.cat([torch.arange(s.start, s.start + s.length) for s in each]) for each in (block.rows, block.cols)
    )
    return block.layer, rows[:, None], cols


def values(shapes: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    """Random tensors; each depends on its place and the seed alone."""
    generators = (torch.Generator().manual_seed(1000 * seed + index) for index in range(len(shapes)))
    return [torch.randn(tuple(shape), generator=each) for shape, each in zip(shapes, generators, strict=True)]


def reference_run(
    weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], **options: Any
) -> ReferenceMuon:
    """Steps copies of `weights` with the gradients of each step."""
    muon = ReferenceMuon([weight.clone() for weight in weights], **options)
    for of_step in gradients:
        muon.step(of_step)
    return muon


def torch_run(
    weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], options: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """The same with torch.optim.Muon."""
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    muon = torch.optim.Muon(params, **{"lr": 0.02, "weight_decay": 0.1, **(options or {})})
    for of_step in gradients:
        for param, gradient in zip(params, of_step, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        muon.step()
    return [param.detach() for param in params]
