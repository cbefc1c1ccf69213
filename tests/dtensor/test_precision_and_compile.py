"""Planned models in bf16 compute, compiled block by block, and on several plan axes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, apply_plan, fully_shard
from hp_plugin.core.dtensor import (
    ShardingPlan,
    ValidationReport,
    applied_plan,
    loss_function,
    plan_transformer,
    validate,
)
from hp_plugin.core.layout import local_tensor
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPE = Shape(tied=True)


def planned(mesh: Any) -> Decoder:
    model = make_decoder(SHAPE)
    plan = plan_transformer(model, {"tp": mesh["tp"].size()}, sequence_parallel=True, loss_parallel=True)
    return apply_plan(model, plan, mesh)


def local_batch(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size, rank = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    ids, targets = (x.chunk(size)[rank] for x in make_batch(SHAPE))
    return ids, targets


def errors_in_bf16() -> tuple[float, float, bool]:
    """Relative errors of gradients in bf16, planned and of one process, to one process in fp32."""
    init_gloo()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    ids, targets = make_batch(SHAPE)
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_decoder(SHAPE).to(dtype)
        F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten()).backward()
        gradients[dtype] = {name: p.grad.float() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model = planned(mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
    dtypes = set()
    model.layers[0].register_forward_hook(lambda module, args, result: dtypes.add(result.dtype))
    loss_function(model)(model(ids), targets).backward()
    assert dtypes == {torch.bfloat16}, "the stream between the layers, and what travels, is bf16"
    layouts = applied_plan(model).layouts  # type: ignore[union-attr]

    exact = gradients[torch.float32]

    def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        wrong = sum((found[name] - expected[name]).square().sum() for name in expected)
        return (wrong / sum(value.square().sum() for value in expected.values())).sqrt().item()  # type: ignore[union-attr]

    mine = {name: local_tensor(p.grad) for name, p in model.named_parameters()}  # type: ignore[arg-type]
    planned_error = error(mine, {name: layouts[name].take(exact[name]) for name in mine})
    alone = error(gradients[torch.bfloat16], exact)
    is_kept = all(local_tensor(p).dtype == local_tensor(p.grad).dtype == torch.float32 for p in model.parameters())  # type: ignore[arg-type]
    return planned_error, alone, is_kept


@pytest.mark.full
def test_bf16_compute_is_as_near_to_fp32_as_that_of_one_process() -> None:
    for mine, alone, is_kept in run_ranks(2, errors_in_bf16, timeout=120.0):
        assert 1e-4 < mine < 2 * alone < 0.1
        assert is_kept, "weights and gradients stay fp32"


def compiled_losses(*, is_compiled: bool, fsdp: bool) -> tuple[list[float], int]:
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = planned(mesh)
    for layer in model.layers if is_compiled else ():
        # A unit of fully_shard is compiled inside of its hooks.
        for module in (layer.attention, layer.mlp) if fsdp else (layer,):
            module.compile(backend="aot_eager")  # type: ignore[union-attr, operator]
    if fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = HyperAdamW(model.parameters(), lr=1e-2)
    ids, targets = local_batch(mesh)
    losses = []
    for _ in range(3):
        loss = loss_function(model)(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [False, True], ids=["plan", "plan_and_fully_shard"])
def test_compiled_layers_train_as_others_do(fsdp: bool) -> None:
    expected = run_ranks(4, compiled_losses, timeout=200.0, is_compiled=False, fsdp=fsdp)
    found = run_ranks(4, compiled_losses, timeout=280.0, is_compiled=True, fsdp=fsdp)
    for (losses, graphs), (others, none) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-5)
        assert losses[-1] < losses[0]
        assert graphs > 0
        assert none == 0


class TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = TwoProducts(), TwoProducts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.first(x))


BOTH = """
axes: {a: 2, b: 2}
modules:
  first:  # both axes divide the hidden dim, and between the modules the rows of the batch
    inputs: {x: {needs: {a: copy, b: copy}}}
    outputs: {output: {produces: {a: partial, b: partial}}}
    parameters:
      fc1.weight: {held: {a: shard(0), b: shard(0)}}
      fc1.bias: {held: {a: shard(0), b: shard(0)}}
      fc2.weight: {held: {a: shard(1), b: shard(1)}}
      fc2.bias: {used: {a: partial, b: partial}}
  second:  # one axis divides the hidden dim, the other one the rows
    inputs: {x: {needs: {a: copy, b: shard(0)}}}
    outputs: {output: {produces: {a: partial, b: shard(0)}}}
    parameters:
      fc1.weight: {held: {a: shard(0)}, used: {a: shard(0), b: copy}}
      fc1.bias: {held: {a: shard(0)}, used: {a: shard(0), b: copy}}
      fc2.weight: {held: {a: shard(1), b: shard(0)}, used: {a: shard(1), b: copy}}
      fc2.bias: {used: {a: partial, b: copy}}
"""


def compare_both() -> ValidationReport:
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    plan = ShardingPlan.from_yaml(BOTH)
    return validate(Net, plan, mesh, {"x": x}, loss_fn=loss, dtype=torch.float64)


@pytest.mark.full
def test_two_axes_of_a_plan_written_by_hand_equal_one_process() -> None:
    """They divide one dim together, different dims, and a weight that one of them gathers for use."""
    report = run_ranks(4, compare_both, timeout=120.0)[0]
    report.raise_if_different()
    assert report.largest_error("gradient") < 1e-13
