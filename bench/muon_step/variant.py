"""What a variant is to the benchmark: an engine that trains the model, with Muon for its matrices."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bench.fsdp_step.model import Transformer
from bench.fsdp_step.pace import Pace
from bench.fsdp_step.variant import Batch, Context
from bench.muon_step.settings import AdamWSettings, MuonSettings


@dataclass
class MarkedPace(Pace):
    """A modelled accelerator that measures how long it stood still between two steps.

    Attributes:
        last_end_ns: when its last piece of work ends, on CLOCK_MONOTONIC. After a backward: when the last gradient of a
            matrix was produced.
        still_s: seconds from there until the first layer of the next forward began.
    """

    last_end_ns: int = 0
    still_s: float = 0.0
    _in_new_step: bool = False

    def new_step(self) -> None:
        """The next piece of work is the first of a step."""
        self._in_new_step = True

    def begin(self, share: float) -> int:
        """As `Pace.begin`."""
        if self._in_new_step:
            self._in_new_step = False
            self.still_s = (time.monotonic_ns() - self.last_end_ns) * 1e-9
        self.last_end_ns = super().begin(share)
        return self.last_end_ns


@dataclass(frozen=True)
class MuonContext(Context):
    """What all variants of a process share.

    Attributes:
        muon: of the matrices.
        adam: of the other parameters.
    """

    muon: MuonSettings = field(kw_only=True)
    adam: AdamWSettings = field(kw_only=True)

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """The AdamW of every variant that may choose its own."""
        own = self.adam
        return torch.optim.AdamW(
            parameters,
            lr=own.lr,
            betas=(own.beta1, own.beta2),
            eps=own.eps,
            weight_decay=own.weight_decay,
            fused=True,
        )


class MuonVariant(abc.ABC):
    """One model and one way to train it. Subclasses make `model` and say how it is stepped.

    Attributes:
        model: the transformer, as the engine holds it.
    """

    model: Transformer

    @abc.abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of this rank's batch, a scalar."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward and makes every gradient final."""

    @abc.abstractmethod
    def update(self) -> None:
        """Steps the optimizers and clears the gradients. What is left behind then belongs to the next forward."""

    @abc.abstractmethod
    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole weight) of every parameter, in the order of the model. Every rank must exhaust it."""

    def facts(self) -> dict[str, Any]:
        """What is really in force, read from the engine's own objects."""
        return {}

    def counters(self) -> dict[str, Any]:
        """What this rank's optimizer counted in its last step, where it counts."""
        return {}

    def set_pace(self, pace: Pace | None) -> None:
        """Blocks wait for `pace` from now on; None: they compute."""
        for block in self.model.blocks:
            for part in block.children():
                part.pace = pace  # type: ignore[assignment]

    def step(self, batch: Batch) -> None:
        """One whole step."""
        self.backward(self.forward(batch))
        self.update()


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon has it: the matrices of the blocks. Embedding, head and norms are AdamW's."""
    return name.startswith("blocks.") and parameter.dim() == 2


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of Muon, and those of AdamW."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if is_matrix(name, p)]
    return matrices, [p for name, p in named if not is_matrix(name, p)]


class Optimizers:
    """Several optimizers that are stepped as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.each = list(optimizers)

    def step(self) -> None:
        """All of them."""
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        """All of them."""
        for optimizer in self.each:
            optimizer.zero_grad()
