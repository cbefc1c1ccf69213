"""A plain model and its sharded twin, and how to compare them. Used by `behaviour`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hp_plugin import fully_shard
from hp_plugin.core.fsdp import Phase
from hp_plugin.core.fsdp.root import unit_of
from tests.fsdp.comparison import full_values
from tests.support import init_gloo

WIDTH = 13  # odd: no dim divides by the ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Four blocks; `checkpointing` wraps each in activation checkpointing."""

    def __init__(self, *, checkpointing: str = "none") -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.last = nn.Linear(WIDTH, 3)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.checkpointing == "pairs":
            for pair in (self.blocks[:2], self.blocks[2:]):
                x = checkpoint(lambda y, pair=pair: pair[1](pair[0](y)), x, use_reentrant=False)
            return self.last(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(x)


def make_mesh(replicate: int, shard: int) -> DeviceMesh:
    init_gloo()
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def pair(mesh: DeviceMesh, **options: Any) -> tuple[Model, Model]:
    """A plain model and its sharded twin, one unit per block."""
    torch.manual_seed(7)
    plain = Model()
    sharded = copy.deepcopy(plain)
    shard_blocks(sharded, mesh, **options)
    return plain, sharded


def shard_blocks(model: Model, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def batch(step: int) -> Tensor:
    """Rows of all ranks; rank r's share is row r."""
    return torch.randn(dist.get_world_size(), 6, 5, generator=torch.Generator().manual_seed(100 + step))


def losses(plain: nn.Module, sharded: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """The loss over all rows on the plain model, and that of this rank's row on the sharded one."""
    rows = batch(step)
    reference = torch.stack([plain(row).square().mean() for row in rows]).mean()
    return reference, sharded(rows[dist.get_rank()]).square().mean()


def full(tensor: Tensor) -> Tensor:
    """The full value, detached. Every rank of the mesh must call."""
    return full_values({"": tensor})[""]


def assert_gradients_equal(plain: nn.Module, sharded: nn.Module, *, factor: float = 1.0) -> None:
    pairs = list(zip(plain.named_parameters(), sharded.named_parameters(), strict=True))
    gradients = full_values({name: found.grad for (name, _), (_, found) in pairs if found.grad is not None})
    for (name, expected), (_, found) in pairs:
        if expected.grad is None:
            assert found.grad is None or not gradients[name].any(), f"{name} has a gradient"
            continue
        assert isinstance(found.grad, DTensor), f"{name} has no gradient"
        torch.testing.assert_close(
            gradients[name], factor * expected.grad, rtol=2e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_at_rest(model: nn.Module) -> None:
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            assert unit.phase is Phase.SHARDED, f"{unit.name} is {unit.phase}"
            for parameter in unit.parameters:
                assert not parameter.full_is_alive, f"{unit.name}.{parameter.name} is alive"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"


def backward_and_compare(plain: nn.Module, sharded: nn.Module, step: int = 0) -> None:
    reference, mine = losses(plain, sharded, step)
    reference.backward()
    mine.backward()
    assert_gradients_equal(plain, sharded)
    assert_at_rest(sharded)
