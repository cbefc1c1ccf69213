"""Muon and checkpoints on parameters that a plan has cut: equal to one process, and loaded under another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import HyperMuon, apply_plan, clip_grad_norm_, fully_shard
from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from hp_plugin.core.dtensor import loss_function, plan_transformer
from hp_plugin.core.layout import local_tensor
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.dtensor.test_experts import ModuleMixture
from tests.support import init_gloo, run_ranks

SHAPES = {
    "tied": Shape(tied=True),
    "fused": Shape(fused=True),
    "stacked": Shape(experts=4, tied=True),
    "modules": Shape(experts=4, tied=True),
}
Sizes = tuple[int, int, int]


def make_model(name: str) -> Decoder:
    model = make_decoder(SHAPES[name])
    if name == "modules":
        for layer in model.layers:
            layer.mlp = ModuleMixture(SHAPES[name])  # type: ignore[assignment]
    return model.double()


def make_planned(name: str, sizes: Sizes, *, fsdp: bool) -> tuple[Decoder, Any]:
    """On a mesh (dp_shard, ep, tp); experts over `ep` if the model has any."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "ep", "tp"))
    model = make_model(name)
    axes = {"ep": sizes[1], "tp": sizes[2]}
    expert_axis = "ep" if SHAPES[name].experts else None
    plan = plan_transformer(model, axes, sequence_parallel=True, loss_parallel=True, expert_axis=expert_axis)
    apply_plan(model, plan, mesh)
    if fsdp:
        dense = mesh["dp_shard", "ep"]._flatten("dp") if expert_axis else mesh["dp_shard"]
        for layer in model.layers:
            if expert_axis:
                fully_shard(layer.mlp.experts, mesh=mesh["dp_shard"])  # type: ignore[union-attr, arg-type]
            fully_shard(layer, mesh=dense)
        fully_shard(model, mesh=dense)
    return model, mesh


def make_optimizer(model: nn.Module) -> HyperMuon:
    return HyperMuon(model, lr=0.02, adam_lr=1e-3, ns_dtype=torch.float32)


def train(model: nn.Module, optimizer: HyperMuon, steps: range, mesh: Any = None) -> None:
    for step in steps:
        ids, targets = make_batch(seed=step)
        if mesh is not None:
            for axis in ("dp_shard", "ep"):
                ids, targets = (x.chunk(mesh[axis].size())[mesh.get_local_rank(axis)] for x in (ids, targets))
        loss_function(model)(model(ids), targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, optimizer: HyperMuon) -> dict[str, torch.Tensor]:
    """Weights, and what the optimizer keeps of each: of a model that no one has cut."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{name} {key}"] = value.detach().clone()
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 1e-5, f"{name} differs by {error:.3g}"


def resume(*, name: str, before: Sizes, after: Sizes, directory: str) -> int:
    """Trains under one plan, saves, loads into one process and under another plan, and trains on."""
    init_gloo()
    whole = make_model(name)
    whole_optimizer = make_optimizer(whole)
    train(whole, whole_optimizer, range(2))
    midway = states(whole, whole_optimizer)
    model, mesh = make_planned(name, before, fsdp=True)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2), mesh)
    save_checkpoint(directory, model, optimizers=optimizer, extra={"step": 2})
    # In one process: all that was saved, with the names and shapes of the whole model.
    alone = make_model(name)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.zero_()
    alone_optimizer = make_optimizer(alone)
    assert load_checkpoint(directory, alone, optimizers=alone_optimizer) == {"step": 2}
    assert_close(states(alone, alone_optimizer), midway)
    # Under another plan, on another mesh, without fully_shard: training goes on as if nothing had been.
    model, mesh = make_planned(name, after, fsdp=dist.get_world_size() > after[2])
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).zero_()
    optimizer = make_optimizer(model)
    load_checkpoint(directory, model, optimizers=optimizer)
    train(model, optimizer, range(2, 4), mesh)
    save_checkpoint(directory, model, optimizers=optimizer)
    load_checkpoint(directory, alone, optimizers=alone_optimizer)
    train(whole, whole_optimizer, range(2, 4))
    assert_close(states(alone, alone_optimizer), states(whole, whole_optimizer))
    # And back: what one process saved is loaded under the plan.
    save_checkpoint(directory, whole, optimizers=whole_optimizer)
    load_checkpoint(directory, model, optimizers=optimizer)
    train(model, optimizer, range(4, 5), mesh)
    train(whole, whole_optimizer, range(4, 5))
    save_checkpoint(directory, model, optimizers=optimizer)
    load_checkpoint(directory, alone, optimizers=alone_optimizer)
    assert_close(states(alone, alone_optimizer), states(whole, whole_optimizer))
    return optimizer.counters.newton_schulz_calls


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("tied", (2, 1, 2), (1, 1, 4)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("tied", (1, 1, 2), (2, 1, 1)),
                ("fused", (2, 1, 2), (4, 1, 1)),
                ("stacked", (2, 2, 1), (1, 2, 2)),
                ("stacked", (1, 4, 1), (2, 1, 2)),
                ("modules", (1, 2, 2), (2, 2, 1)),
                ("modules", (1, 4, 1), (1, 1, 4)),
            ]
        ),
    ],
    ids=str,
)
def test_muon_and_checkpoints_under_plans_equal_one_process(
    name: str, before: Sizes, after: Sizes, tmp_path: Path
) -> None:
    ranks = before[0] * before[1] * before[2]
    directory = str(tmp_path / "checkpoint")
    calls = run_ranks(ranks, resume, timeout=280.0, name=name, before=before, after=after, directory=directory)
    if name == "tied":  # 7 matrices in each of 2 layers, each orthogonalized by one rank
        assert sum(calls) == 14
