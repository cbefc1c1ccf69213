"""A planned model in steady steps: plain tensors only, the collectives of the plan, and what users do with a model."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hp_plugin import (
    ConfigurationError,
    HyperAdamW,
    ShardingPlan,
    apply_plan,
    clip_grad_norm_,
)
from hp_plugin.core.dtensor import applied_plan, loss_function, plan_transformer
from hp_plugin.core.layout import attached_layout
from hp_plugin.core.topology import Topology, TrafficRecorder
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.optim.parameters import no_dtensor_work
from tests.support import init_gloo, run_ranks

SHAPE = Shape(layers=2, tied=True)


@contextlib.contextmanager
def no_dispatch_to_python() -> Iterator[None]:
    """Fails if a `__torch_dispatch__` or `__torch_function__` written in Python, of whatever class, is entered."""
    entered: list[str] = []

    def see(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
            entered.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert not entered, f"dispatched to Python {len(entered)} times, first at {entered[0]}"


def test_a_planted_dispatch_is_seen() -> None:
    class Planted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(AssertionError, match="dispatched to Python"), no_dispatch_to_python():
        torch.ones(2).as_subclass(Planted) + 1


def planned(shape: Shape = SHAPE, **options: Any) -> tuple[Decoder, DeviceMesh]:
    init_gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = make_decoder(shape)
    return apply_plan(model, plan_transformer(model, {"tp": mesh.size()}, **options), mesh), mesh


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    ids, targets = make_batch(SHAPE)
    loss = loss_function(model)(model(ids), targets)
    loss.backward()
    if optimizer is not None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def train_and_count(*, sequence_parallel: bool) -> tuple[list[float], dict[str, int]]:
    model, _ = planned(sequence_parallel=sequence_parallel, loss_parallel=True)
    optimizer = HyperAdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer).item()]
    with no_dtensor_work(), no_dispatch_to_python():
        losses += [step(model, optimizer).item() for _ in range(10)]
    assert all(type(p) is nn.Parameter and type(p.data) is torch.Tensor for p in model.parameters())
    with TrafficRecorder(Topology.from_supernode_size(2, 2)) as recorder:
        step(model)
    return losses, dict(recorder.traffic.calls)


def reference_losses() -> list[float]:
    model = make_decoder(SHAPE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=HyperAdamW([nn.Parameter(torch.ones(1))]).defaults["weight_decay"]
    )
    losses = []
    for _ in range(11):
        ids, targets = make_batch(SHAPE)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        # Forward: one all-reduce per region, one for the embedding, two for the loss. Backward: per region and head.
        (False, {"all_reduce": 2 * 2 + 1 + 2 + 2 * 2 + 1}),
        # All-reduces: embedding, loss 2, and two tensors of five norms. Regions and head gather and scatter; the stream
        # is gathered once more in backward, where its division began.
        (True, {"all_reduce": 3 + 10, "all_gather": 2 * 2 + 1 + 2 * 2 + 1, "reduce_scatter": 2 * 2 + 2 * 2 + 1}),
    ],
    ids=["whole", "sequence"],
)
def test_ten_steady_steps_make_no_dtensor_and_equal_one_process(
    sequence_parallel: bool, expected: dict[str, int]
) -> None:
    """Through clipping and AdamW; the loss is learnt from, so a wrong norm or a rank that drifts would show."""
    found = run_ranks(2, train_and_count, timeout=120.0, sequence_parallel=sequence_parallel)
    assert found[0] == found[1]
    losses, calls = found[0]
    assert losses[-1] < 0.7 * losses[0]
    torch.testing.assert_close(losses, reference_losses(), rtol=2e-5, atol=0)
    assert calls == expected


def uses_of_a_model() -> None:
    model, mesh = planned(sequence_parallel=True, loss_parallel=True)
    step(model)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    # A copy works on its own parameters, and knows its plan.
    twin = copy.deepcopy(model)
    assert applied_plan(twin) is applied_plan(model)
    with torch.no_grad():
        twin.layers[0].mlp.w1.weight.zero_()  # type: ignore[union-attr, operator]
    assert step(twin) != step(model)
    # Activation checkpointing repeats the collectives and changes nothing.
    model.zero_grad()
    for layer in model.layers:
        original = type(layer).forward
        layer.__class__ = type(
            "Checkpointed",
            (type(layer),),
            {"forward": lambda self, x, f=original: checkpoint(f, self, x, use_reentrant=False)},
        )
    step(model)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    # Tied weights stay one parameter, with its layout.
    assert model.tokens.weight is model.output.weight
    attached = attached_layout(model.tokens.weight)
    assert attached is not None
    assert attached.layout.global_shape == (64, 32)
    assert attached.layout.local_shape(attached.coordinate) == (32, 32) == tuple(model.tokens.weight.shape)
    # What cannot be right is refused.
    plan = applied_plan(model).plan  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="applied to this model before"):
        apply_plan(model, plan, mesh)
    with pytest.raises(ConfigurationError, match="for axis 'cp', but the mesh has"):
        apply_plan(nn.Identity(), ShardingPlan(axes={"cp": 2}), mesh)
    with pytest.raises(ConfigurationError, match="4 ranks on axis tp, but the mesh has 2"):
        apply_plan(nn.Identity(), ShardingPlan(axes={"tp": 4}), mesh)
    with pytest.raises(ConfigurationError, match='mode="fast" is unknown'):
        apply_plan(nn.Identity(), plan, mesh, mode="fast")  # type: ignore[arg-type]
    ids, _ = make_batch(SHAPE)
    with pytest.raises(ConfigurationError, match=r"module layers.0, input x: dim 1 .* 7 is not a multiple of 2"):
        model(ids[:, :7])


def test_copies_checkpointing_ties_and_refusals() -> None:
    run_ranks(2, uses_of_a_model, timeout=120.0)


def losses_of_divided_logits() -> None:
    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = make_decoder(SHAPE)
    apply_plan(model, plan_transformer(model, {"tp": 2}, loss_parallel=True), mesh)
    loss = loss_function(model)
    rank = mesh.get_local_rank("tp")
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 200.0):  # large logits overflow unless the maximum is taken off
        whole = (scale * torch.randn(4, 8, 64, generator=generator)).requires_grad_()
        targets = torch.randint(64, (4, 8), generator=generator)
        targets[:, 0] = -100
        for reduction in ("mean", "sum", "none"):
            expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction=reduction)
            piece = whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
            found = loss(piece, targets, reduction=reduction)
            weights = torch.randn(expected.shape, generator=generator)
            (expected * weights).sum().backward()
            (found.flatten() * weights.flatten()).sum().backward()
            torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-6, atol=1e-5)
            assert whole.grad is not None
            torch.testing.assert_close(piece.grad, whole.grad.chunk(2, -1)[rank], rtol=1e-5, atol=1e-7)
            whole.grad = None
    with pytest.raises(ConfigurationError, match="does not take label_smoothing"):
        loss(whole, targets, label_smoothing=0.1)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_loss_of_divided_logits_equals_cross_entropy() -> None:
    run_ranks(2, losses_of_divided_logits)
