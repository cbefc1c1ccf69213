"""Rank functions: units on another mesh than the unit they lie in, as the experts of an expert-parallel model are.

Ranks are in groups that hold the same expert: rank r has expert r % count, and sends its rows through it. In one
process every batch goes through the expert of its rank, so the gradient of an expert is a mean over all ranks, of which
some have contributed nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, fully_shard
from hp_plugin.core.layout import local_tensor
from hp_plugin.core.transport import set_gradient_owner
from tests.fsdp.twins import WIDTH, batch, full
from tests.support import init_gloo

STEPS, MICRO_BATCHES = 3, 2
OPTIMIZER = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """A dense part, an expert, and another dense part that runs after it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([Expert() for _ in range(count)])
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y = self.experts[expert](self.dense(self.norm(x)))
        return x + self.scale(y)


class Mixture(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([Layer(count) for _ in range(3)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, expert: int = 0) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, expert)
        return self.last(x)


def mesh_over(rows: list[list[int]]) -> DeviceMesh:
    """The (dp_replicate, dp_shard) mesh of `rows` that has this rank. Every rank must call with the same lists."""
    return DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("dp_replicate", "dp_shard"))


def expert_mesh(count: int, replicate: int) -> DeviceMesh:
    """The mesh of the ranks that hold the expert of this rank."""
    mine = None
    for expert in range(count):
        ranks = list(range(expert, dist.get_world_size(), count))
        shard = len(ranks) // replicate
        rows = [ranks[start : start + shard] for start in range(0, len(ranks), shard)]
        groups = [dist.new_group(row) for row in rows], [dist.new_group(list(line)) for line in zip(*rows)]
        for at, row in enumerate(rows):
            if dist.get_rank() in row:
                shard_group, replicate_group = groups[0][at], groups[1][row.index(dist.get_rank())]
                mine = DeviceMesh.from_group(
                    [replicate_group, shard_group],
                    "cpu",
                    torch.tensor(rows),
                    mesh_dim_names=("dp_replicate", "dp_shard"),
                )
    assert mine is not None
    return mine


def keep_expert(model: Mixture, expert: int) -> Mixture:
    """A copy of `model` with one expert in each layer."""
    mine = copy.deepcopy(model)
    for layer in mine.layers:
        assert isinstance(layer, Layer)
        layer.experts = nn.ModuleList([layer.experts[expert]])
    return mine


def shard(
    model: Mixture,
    dense: DeviceMesh,
    experts: DeviceMesh,
    *,
    mixed: bool = False,
    own_divisor: bool = False,
    **options: Any,
) -> Mixture:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
    settings: dict[str, Any] = {"mp_policy": policy, **options} if mixed else options
    number = settings.pop("reshard_after_forward", True)
    for layer in model.layers:
        divides = number if experts.size(1) % (int(number) or 1) == 0 else True
        fully_shard(layer.experts[0], mesh=experts, reshard_after_forward=divides, **settings)
        fully_shard(layer, mesh=dense, reshard_after_forward=number, **settings)
    fully_shard(model, mesh=dense, **settings)
    if not own_divisor:
        model.set_gradient_divide_factor(float(dense.size()))
    return model


def train(model: Mixture, *, step: int, all_reduce_last: bool = True) -> Tensor:
    """Gradients of one step of the sharded model, over micro-batches. Returns the sum of this rank's losses."""
    total = torch.zeros(())
    for index in range(MICRO_BATCHES):
        if all_reduce_last:
            model.set_requires_all_reduce(index == MICRO_BATCHES - 1)
        rows = batch(MICRO_BATCHES * step + index)[dist.get_rank()]
        loss = model(rows).float().square().mean()
        loss.backward()
        total += loss.detach()
    return total


def name_in_reference(name: str, expert: int) -> str:
    return name.replace("experts.0.", f"experts.{expert}.")


def compare(
    *, dense: list[int], count: int, replicate: int, owned: bool = False, **options: Any
) -> dict[str, float | dict[str, str | None]]:
    """Largest differences of losses, gradients and weights to one process in three steps, and transports by unit.

    Args:
        dense: Sizes (replicate, shard) of the mesh of everything but experts.
        count: How many experts there are; as many ranks hold different ones.
        replicate: Replicas of an expert's mesh.
        owned: Gradients of experts go to the last of their replicas alone.
        **options: Of `fully_shard`.
    """
    init_gloo()
    torch.manual_seed(11)
    reference = Mixture(count)
    mine = dist.get_rank() % count
    ranks = torch.arange(dist.get_world_size()).view(*dense).tolist()
    experts = expert_mesh(count, replicate)
    model = shard(keep_expert(reference, mine), mesh_over(ranks), experts, **options)
    theirs, ours = (torch.optim.AdamW(reference.parameters(), foreach=False, **OPTIMIZER), None)
    if not owned:
        ours = HyperAdamW(model.parameters(), **OPTIMIZER)
    else:
        last = int(experts.mesh[-1, experts.get_local_rank(1)])
        for name, parameter in model.named_parameters():
            if "experts" in name:
                set_gradient_owner(parameter, last)
    found: dict[str, float] = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "wrongly delivered": 0.0}
    for step in range(STEPS if ours is not None else 1):
        losses = _reference_losses(reference, step, count)
        found["loss"] = max(found["loss"], (train(model, step=step) - losses[dist.get_rank()]).abs().item())
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            other = expected[name_in_reference(name, mine)]
            assert other.grad is not None
            if owned and "experts" in name:
                is_owner = dist.get_rank() == last
                found["wrongly delivered"] += float((parameter.grad is not None) != is_owner)
                if parameter.grad is None:
                    continue
                start = _first_row(parameter)
                got = local_tensor(parameter.grad)
                difference = (got - other.grad[start : start + got.shape[0]]).abs()
            else:
                difference = (full(parameter.grad) - other.grad).abs()
            found["gradient"] = max(found["gradient"], _largest(difference) / _largest(other.grad))
        if ours is not None:
            theirs.step()
            ours.step()
            for name, parameter in model.named_parameters():
                difference = (full(parameter) - expected[name_in_reference(name, mine)]).abs()
                found["weight"] = max(found["weight"], _largest(difference))
        model.zero_grad()
        reference.zero_grad()
    return {**found, "transports": {unit["name"]: unit["transport"] for unit in model.fsdp_units()}}


def _reference_losses(reference: Mixture, step: int, count: int) -> list[Tensor]:
    ranks = dist.get_world_size()
    losses = [torch.zeros(()) for _ in range(ranks)]
    for index in range(MICRO_BATCHES):
        for rank, rows in enumerate(batch(MICRO_BATCHES * step + index)):
            loss = reference(rows, rank % count).square().mean()
            (loss / ranks).backward()
            losses[rank] += loss.detach()
    return losses


def _first_row(parameter: Any) -> int:
    group, size = parameter.device_mesh.get_local_rank(1), parameter.device_mesh.size(1)
    return min(group * -(-parameter.shape[0] // size), parameter.shape[0])


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def bits(*, dense: list[int], count: int, replicate: int) -> list[Tensor]:
    """Local gradients of three steps in two precisions, and the weights of the end, with `deterministic`."""
    init_gloo()
    experts = expert_mesh(count, replicate)
    mesh = mesh_over(torch.arange(dist.get_world_size()).view(*dense).tolist())
    seen = []
    for mixed in (False, True):
        torch.manual_seed(11)
        plain = keep_expert(Mixture(count), dist.get_rank() % count)
        model = shard(plain, mesh, experts, mixed=mixed, deterministic=True)
        optimizer = HyperAdamW(model.parameters(), **OPTIMIZER)
        for step in range(STEPS):
            train(model, step=step)
            seen += [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        seen += [local_tensor(p).clone() for p in model.parameters()]
    return seen
