"""What a variant is to the benchmark: one model, one way to train it, and what of it lies on this rank."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.fsdp_step.model import Transformer, loss_of, make_model
from bench.fsdp_step.pace import Pace
from bench.fsdp_step.settings import Options, Size

Batch = tuple[torch.Tensor, torch.Tensor]


class PeerUnavailableError(Exception):
    """This peer cannot run here; the sentence goes into its row. Raised on every rank alike."""


@dataclass(frozen=True)
class Context:
    """What all variants of a process share.

    Attributes:
        mesh: 2-D, (dp_replicate, dp_shard): between supernodes, and inside one.
        size: of the model.
        pace: the modelled accelerator; None under real compute.
        seed: of the weights.
        learning_rate, weight_decay: of AdamW.
    """

    mesh: DeviceMesh
    size: Size
    pace: Pace | None
    seed: int
    learning_rate: float
    weight_decay: float

    def model(self) -> Transformer:
        """A new model with the weights that all variants start from."""
        return make_model(self.size, self.pace, seed=self.seed)

    @property
    def inter_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same shard."""
        return self.mesh["dp_replicate"].get_group()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks of this supernode."""
        return self.mesh["dp_shard"].get_group()

    @property
    def replicas(self) -> int:
        """Supernodes."""
        return int(self.mesh.size(0))

    def adamw(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of every variant that may choose its own."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)


class Variant(abc.ABC):
    """One model and one way to train it.

    Attributes:
        module: called with token ids, gives logits.
        optimizer: stepped by `update` unless that is overridden.
        norm_group: ranks over which `local_gradients` cover the model exactly once; None: this rank alone does.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    norm_group: dist.ProcessGroup | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of this rank's batch, a scalar."""
        tokens, targets = batch
        return loss_of(self.module(tokens), targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward and makes every gradient final."""
        loss.backward()

    def update(self) -> None:
        """Steps the optimizer and clears the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abc.abstractmethod
    def local_gradients(self) -> list[torch.Tensor]:
        """What this rank holds of the final gradients, between `backward` and `update`."""

    def facts(self) -> dict[str, Any]:
        """What is really in force, read from the engine's own objects."""
        return {}

    def step(self, batch: Batch) -> torch.Tensor:
        """One whole step; returns the detached loss."""
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()

    def gradient_norm(self) -> float:
        """Norm of the whole gradient; every rank must call."""
        total = torch.zeros(1, dtype=torch.float64)
        for gradient in self.local_gradients():
            total += gradient.double().square().sum()
        if self.norm_group is not None:
            dist.all_reduce(total, group=self.norm_group)
        return float(total.sqrt())


def take_options(kind: str, options: Options, **defaults: Any) -> dict[str, Any]:
    """`options` over `defaults`; a name that `defaults` lacks is refused."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ValueError(f"variant {kind}: option {unknown[0]!r} is unknown; it takes {sorted(defaults) or 'none'}")
    return {**defaults, **options}
