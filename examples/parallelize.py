r"""Tensor parallelism, FSDP and replication of one plain torch model, each with its own submesh.

In the manner of torchtitan's ``parallelize_llama``: ``parallelize(model, mesh, config)`` hands ``mesh["tp"]`` to the
sharding plan and ``mesh["dp_shard"]``, or ``mesh["dp_replicate", "dp_shard"]``, to ``fully_shard``. Trains on the bytes
of this folder's scripts, with Muon and AdamW, and compares every loss with that of one process:

    torchrun --nproc-per-node 8 examples/parallelize.py --tensor-parallel-degree 2 --data-parallel-replicate-degree 2

``--config FILE`` reads the degrees from the ``parallelism`` block of a YAML file. Exits with 1 if the losses differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hp_plugin
from hp_plugin.core.dtensor import loss_function, plan_transformer

VOCABULARY = 256  # bytes
TOLERANCE = 1e-5  # of losses, relative, after any number of the few steps here


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees, by the names of the ``parallelism`` block; -1 takes all ranks that the others leave.

    Attributes:
        tensor_parallel_degree: each layer is divided over so many ranks.
        data_parallel_replicate_degree: so many copies of the sharded model.
        data_parallel_shard_degree: each copy is sharded over so many ranks.
        sequence_parallel: divide activations over the sequence between the divided products.
    """

    tensor_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    sequence_parallel: bool = True

    @classmethod
    def read(cls, path: str) -> ParallelConfig:
        """From a YAML file."""
        return cls(**yaml.safe_load(Path(path).read_text())["parallelism"])

    def mesh(self) -> DeviceMesh:
        """The mesh ``[pp, dp_replicate, dp_shard, cp, tp]`` over all ranks; each copy of the model is a supernode."""
        ranks = dist.get_world_size()
        return hp_plugin.build_mesh(
            tensor_parallel_degree=self.tensor_parallel_degree,
            data_parallel_replicate_degree=self.data_parallel_replicate_degree,
            data_parallel_shard_degree=self.data_parallel_shard_degree,
            topology=hp_plugin.Topology.from_supernode_size(ranks, ranks // self.data_parallel_replicate_degree),
        )


def parallelize(model: Llama, mesh: DeviceMesh, config: ParallelConfig) -> Llama:
    """Divides ``model`` in place; every technique gets the axes of ``mesh`` that are its own. Every rank must call."""
    if config.tensor_parallel_degree > 1:
        plan = plan_transformer(
            model,
            {"tp": config.tensor_parallel_degree},
            sequence_parallel=config.sequence_parallel,
            loss_parallel=True,
        )
        hp_plugin.apply_plan(model, plan, mesh["tp"])
    if config.data_parallel_replicate_degree > 1:
        data_mesh = mesh["dp_replicate", "dp_shard"]
    else:
        data_mesh = mesh["dp_shard"]
    for layer in model.layers:
        hp_plugin.fully_shard(layer, mesh=data_mesh)
    hp_plugin.fully_shard(model, mesh=data_mesh)
    return model


# ---------------------------------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, key_heads, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, key_heads * self.head_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        batch, tokens, _ = x.shape
        q = rotated(self.wq(x).view(batch, tokens, self.n_heads, self.head_dim).transpose(1, 2))
        k = rotated(self.wk(x).view(batch, tokens, self.n_kv_heads, self.head_dim).transpose(1, 2))
        v = self.wv(x).view(batch, tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (..., tokens, size of a head)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype).outer(frequencies)
    one, other = x.split(half, dim=-1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], dim=-1)


class FeedForward(nn.Module):
    """Gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, heads=4, key_heads=2), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens (batch, tokens) -> logits (batch, tokens, vocabulary)."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# ------------------------------------------------------------------------------------------------------- the training


def batch_of(step: int, *, rows: int = 8, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the whole batch of a step: bytes of the scripts in this folder."""
    text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator).tolist()
    tokens = torch.tensor([list(text[start : start + length + 1]) for start in starts])
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, steps: int, mesh: DeviceMesh | None = None) -> list[float]:
    """Trains on this rank's rows of each batch (``mesh`` None: on all). Returns the losses of the whole batches."""
    optimizer = hp_plugin.HyperMuon(model, lr=0.01, adam_lr=3e-3, ns_dtype=torch.float32)
    loss_of = loss_function(model)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step)
        for axis in ("dp_replicate", "dp_shard") if mesh is not None else ():
            assert mesh is not None
            inputs, targets = (x.chunk(mesh[axis].size())[mesh.get_local_rank(axis)] for x in (inputs, targets))
        loss = loss_of(model(inputs), targets)
        loss.backward()
        hp_plugin.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean)  # ranks of one tensor-parallel group have the same loss
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


def make_model() -> Llama:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    return Llama()


def compare(config: ParallelConfig, steps: int) -> tuple[list[float], list[float]]:
    """Losses of the parallel run and of one process. Every rank must call."""
    mesh = config.mesh()
    found = train(parallelize(make_model(), mesh, config), steps, mesh)
    return found, train(make_model(), steps)


def main(argv: list[str] | None = None) -> int:
    """Trains in parallel and alone, prints both losses, and returns 0 if they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="YAML file with a parallelism block, instead of the degrees")
    parser.add_argument("--tensor-parallel-degree", type=int, default=1)
    parser.add_argument("--data-parallel-replicate-degree", type=int, default=1)
    parser.add_argument("--data-parallel-shard-degree", type=int, default=-1)
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)
    config = ParallelConfig(
        args.tensor_parallel_degree,
        args.data_parallel_replicate_degree,
        args.data_parallel_shard_degree,
        not args.no_sequence_parallel,
    )
    if args.config is not None:
        config = ParallelConfig.read(args.config)
    dist.init_process_group("gloo")
    try:
        found, expected = compare(config, args.steps)
        rank = dist.get_rank()
    finally:
        dist.destroy_process_group()
    largest = max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    rows: list[tuple[Any, ...]] = list(zip(range(args.steps), found, expected, strict=True))
    if rank == 0:
        print("\n".join(f"step {step}: loss {one:.6f}, of one process {other:.6f}" for step, one, other in rows))
        print(f"largest relative difference {largest:.2g}, allowed {TOLERANCE:.2g}")
    return 0 if largest <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
