"""This project's `fully_shard` and `HyperMuon`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bench.fsdp_step.peers.ours import OPTIONS, Ours
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Batch, take_options
from bench.muon_step.variant import MuonContext, MuonVariant, split_parameters
from hp_plugin.core.muon.optimizer import HyperMuon

MUON_OPTIONS: dict[str, Any] = {
    "exchange": None,
    "kernel": None,
    "wave_bytes": None,
    "momentum_placement": None,
    "gradients": None,
}
"""Of HyperMuon, beside those of `fully_shard`."""


class HyperMuonVariant(MuonVariant):
    """Every block, the embedding and the head are a unit of our FSDP; HyperMuon has all parameters."""

    def __init__(self, context: MuonContext, options: Options) -> None:
        self.engine = Ours(context, {name: options[name] for name in OPTIONS})
        self.model = self.engine.module  # type: ignore[assignment]
        own, adam = context.muon, context.adam
        given = {name: options[name] for name in MUON_OPTIONS if options[name] is not None}
        matrices, rest = split_parameters(self.model)
        self.optimizer = HyperMuon(
            [{"params": matrices, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}],
            lr=own.lr,
            momentum=own.momentum,
            nesterov=True,
            weight_decay=own.weight_decay,
            adam_lr=adam.lr,
            adam_betas=(adam.beta1, adam.beta2),
            adam_eps=adam.eps,
            adam_weight_decay=adam.weight_decay,
            scale="clamped_aspect",
            coefficients="classic",
            steps=own.steps,
            ns_dtype=torch.bfloat16,
            **given,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """The engine's."""
        return self.engine.forward(batch)

    def backward(self, loss: torch.Tensor) -> None:
        """The engine's."""
        self.engine.backward(loss)

    def update(self) -> None:
        """HyperMuon."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered one by one."""
        for name, parameter in self.model.named_parameters():
            yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()

    def facts(self) -> dict[str, Any]:
        """Of the engine."""
        return self.engine.facts()

    def counters(self) -> dict[str, Any]:
        """HyperMuon's counters of this rank, after its last step."""
        return self.optimizer.counters.as_dict()


def build_ours(context: MuonContext, options: Options) -> MuonVariant:
    """Ours, with the options of `fully_shard` and of HyperMuon."""
    return HyperMuonVariant(context, take_options("hypermuon", options, **OPTIONS, **MUON_OPTIONS))
