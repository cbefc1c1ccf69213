"""The same training on a device type and on the CPU: FSDP, Muon, clipping, a checkpoint, and training on from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import HyperMuon, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from tests.fake_npu import device
from tests.support import init_gloo

WIDTH, VOCABULARY, BATCH = 32, 64, 8
_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Block(nn.Module):
    """A residual block with attention, whose matrices have rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # No bias: that of the keys has no gradient but rounding, which Adam makes large.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 71), nn.Linear(71, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)) / WIDTH**0.5
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Result:
    """What a rank saw.

    Attributes:
        losses: Of every step, before and after the checkpoint.
        norms: Of gradients before clipping.
        weights: Full parameters at the end, on the host, by name.
        devices: Device types of parameters, gradients and optimizer state, in that order.
        backend: Of the shard group.
        waits: How often the computing thread waited, by cause.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    devices: list[str]
    backend: str
    waits: dict[str, int]


def train(device_type: str, directory: str, precision: str = "fp32", micro_batches: int = 1) -> Result:
    """Four ranks in two supernodes: three steps, a checkpoint, a fresh model from it, two more steps."""
    if device_type == "npu":
        device.install()
        device.init_ranks()
    else:
        init_gloo()
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    rank = torch.distributed.get_rank()
    path = str(Path(directory, "checkpoint"))

    def fresh(seed: int) -> tuple[Any, HyperMuon]:
        torch.manual_seed(seed)
        model: Any = Model().to(device_type)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=_POLICIES[precision], transport="c10d")
        return model, HyperMuon(model, lr=0.02, adam_lr=1e-3, ns_dtype=torch.float32)

    losses: list[float] = []
    norms: list[float] = []

    def step(model: Any, optimizer: HyperMuon, number: int) -> None:
        for micro_batch in range(micro_batches):
            model.set_requires_all_reduce(micro_batch == micro_batches - 1)
            generator = torch.Generator().manual_seed(1000 * number + 10 * micro_batch + rank)
            tokens = torch.randint(0, VOCABULARY, (BATCH, 9), generator=generator).to(device_type)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
            loss.backward()
            losses.append(loss.item())
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = fresh(0)
    for number in range(3):
        step(model, optimizer, number)
    save_checkpoint(path, model, optimizers=optimizer)
    model, optimizer = fresh(1)
    load_checkpoint(path, model, optimizers=optimizer)
    for number in range(3, 5):
        step(model, optimizer, number)
    waits = {cause: wait.count for cause, wait in model.fsdp_counters().waits.items()}
    model(torch.zeros(2, 4, dtype=torch.long, device=device_type)).sum().backward()
    tensors = [next(model.parameters()), next(model.parameters()).grad]
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    devices = [tensor.device.type for tensor in tensors if tensor is not None]
    devices += sorted({value.device.type for value in state if value.dim() > 0})
    weights = {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}
    return Result(losses, norms, weights, devices, torch.distributed.get_backend(mesh.get_group("dp_shard")), waits)
