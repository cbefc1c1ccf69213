"""torch.optim.Muon on the DTensors of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bench.fsdp_step.peers.fsdp2 import FSDP2, TUNING, HookedFSDP2
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Batch, PeerUnavailableError, take_options
from bench.muon_step.variant import MuonContext, MuonVariant, Optimizers, split_parameters

_MESHES = ("two_tier", "flat", "hooked")


class TorchDTensor(MuonVariant):
    """FSDP2 and torch.optim.Muon, which runs Newton-Schulz on DTensors; torch.optim.AdamW for the rest.

    `mesh` is "two_tier" (FSDP2's own HSDP), "flat" (1-D over all ranks) or "hooked" (1-D inside the supernode, and an
    asynchronous all-reduce between supernodes in FSDP2's hook).
    """

    def __init__(self, context: MuonContext, options: Options) -> None:
        tuning = {**TUNING, "reshard_after_forward": options["reshard_after_forward"], "own_units": True}
        self.mesh = options["mesh"]
        if self.mesh == "hooked":
            self.engine: FSDP2 = HookedFSDP2(context, tuning)
        elif self.mesh == "flat":
            self.engine = FSDP2(context, init_device_mesh("cpu", (context.mesh.size(),)), tuning)
        else:
            self.engine = FSDP2(context, context.mesh, tuning)
        self.model = self.engine.module  # type: ignore[assignment]
        self.optimizers = Optimizers(self._make_optimizers(context))

    def _make_optimizers(self, context: MuonContext) -> list[torch.optim.Optimizer]:
        matrices, rest = split_parameters(self.model)
        own = context.muon
        muon = torch.optim.Muon(
            matrices,
            lr=own.lr,
            weight_decay=own.weight_decay,
            momentum=own.momentum,
            nesterov=True,
            ns_steps=own.steps,
            adjust_lr_fn="original",
        )
        return [muon, context.adamw(rest)]

    def forward(self, batch: Batch) -> torch.Tensor:
        """FSDP2's."""
        return self.engine.forward(batch)

    def backward(self, loss: torch.Tensor) -> None:
        """FSDP2's, with the wait for reductions in its hook."""
        self.engine.backward(loss)

    def update(self) -> None:
        """Both optimizers."""
        self.optimizers.step()
        self.optimizers.zero_grad()

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered one by one."""
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter.full_tensor().detach()

    def facts(self) -> dict[str, Any]:
        """Which mesh the matrices lie on, and how."""
        matrix = split_parameters(self.model)[0][0]
        assert isinstance(matrix, DTensor)
        return {
            **self.engine.facts(),
            "mesh": list(matrix.device_mesh.shape),
            "placements": [str(placement) for placement in matrix.placements],
        }


def build_torch_dtensor(context: MuonContext, options: Options) -> MuonVariant:
    """FSDP2 with torch.optim.Muon."""
    own = take_options("torch_dtensor", options, mesh="two_tier", reshard_after_forward=False)
    if own["mesh"] not in _MESHES:
        raise ValueError(f"variant torch_dtensor: mesh {own['mesh']!r} is unknown; use one of {_MESHES}")
    if not hasattr(torch.optim, "Muon"):
        raise PeerUnavailableError(f"torch {torch.__version__} has no torch.optim.Muon; it came with 2.9")
    return TorchDTensor(context, own)
