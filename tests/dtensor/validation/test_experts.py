"""Experts by all-to-all: the dispatch is one region, the batch is divided over the experts' axis, faults are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import ConfigurationError, UnsupportedError
from hp_plugin.core.dtensor import apply_plan, loss_function, plan_transformer, simulate
from hp_plugin.core.dtensor.validation import PlacementError, SimulationReport, report_of
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.dtensor.test_experts import make_model
from tests.support import init_gloo, run_ranks

SHAPE = Shape(experts=4, tied=True)


def followed(
    axes: dict[str, int], fault: Callable[[nn.Module], None] | None = None, **options: Any
) -> SimulationReport:
    plan = plan_transformer(make_decoder(SHAPE), axes, expert_axis="ep", **options)
    return simulate(lambda: make_decoder(SHAPE), plan, make_batch(SHAPE), after_apply=fault, timeout_s=60.0)


@pytest.mark.parametrize(
    ("axes", "divided"),
    [
        ({"ep": 2, "tp": 1}, False),
        ({"ep": 2, "tp": 2}, True),
        pytest.param({"ep": 4, "tp": 1}, True, marks=pytest.mark.full),
        pytest.param({"ep": 2, "tp": 2}, False, marks=pytest.mark.full),
        pytest.param({"tp": 2, "ep": 2}, True, marks=pytest.mark.full),
        pytest.param({"ep": 4, "tp": 2}, True, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_clean_model_gives_no_finding(axes: dict[str, int], divided: bool) -> None:
    report = followed(axes, sequence_parallel=divided, loss_parallel=divided)
    report.raise_if_different()
    assert not report.unchecked
    assert report.parameters == len(list(make_decoder(SHAPE).parameters()))
    experts = [o for o in report.operations if o.module == "layers.0.mlp.experts"]
    [region] = experts
    assert region.how == "region"
    assert "ep: shard(0)" in region.placements[0]
    assert ("tp: partial" in region.placements[0]) == (axes["tp"] > 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["modules", "starved"])
def test_experts_that_are_modules_or_get_no_token(kind: str) -> None:
    plan = plan_transformer(make_model(kind), {"ep": 2, "tp": 1}, expert_axis="ep")
    simulate(lambda: make_model(kind), plan, make_batch(SHAPE)).raise_if_different()


def experts(model: nn.Module) -> Any:
    return model.get_submodule("layers.1.mlp.experts")


def gradients_are_no_means(model: nn.Module) -> None:
    experts(model)._hp_boundary = dataclasses.replace(experts(model)._hp_boundary, parameters=())


def tokens_go_elsewhere(model: nn.Module) -> None:
    class Elsewhere:
        def __init__(self, dispatch: Any) -> None:
            self.dispatch = dispatch

        def run(self, forward: Any, module: Any, tokens: Any, chosen: Any, weights: Any) -> Any:
            return self.dispatch.run(forward, module, tokens, (chosen + 1) % 4, weights)

    boundary = experts(model)._hp_boundary
    experts(model)._hp_boundary = dataclasses.replace(boundary, dispatch=Elsewhere(boundary.dispatch))


@pytest.mark.parametrize(
    ("fault", "kind", "tensor"),
    [
        (gradients_are_no_means, "gradient", "gradient of parameter gate_up_proj"),
        (tokens_go_elsewhere, "output", "output 0"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_faults_of_the_dispatch_are_located(fault: Any, kind: str, tensor: str) -> None:
    [finding] = followed({"ep": 2, "tp": 1}, fault).findings
    assert (finding.module, finding.op, finding.kind) == ("layers.1.mlp.experts", "region", kind)
    assert finding.tensor == tensor
    assert finding.axis == "ep"


def test_a_batch_that_the_axis_does_not_divide_and_a_loss_of_ones_own_are_refused() -> None:
    plan = plan_transformer(make_decoder(SHAPE), {"ep": 2, "tp": 1}, expert_axis="ep")
    with pytest.raises(ConfigurationError, match=r"\(3, 8\), whose dim 0 the axes ep do not divide"):
        simulate(lambda: make_decoder(SHAPE), plan, make_batch(SHAPE, rows=3))
    with pytest.raises(UnsupportedError, match="divides the batch over ep"):
        simulate(lambda: make_decoder(SHAPE), plan, make_batch(SHAPE), loss_fn=lambda m, b: m(b[0]).sum())


def test_shapes_on_many_ranks() -> None:
    shape = Shape(experts=40, layers=1)
    plan = plan_transformer(make_decoder(shape), {"ep": 40, "tp": 1}, expert_axis="ep")
    report = simulate(lambda: make_decoder(shape), plan, make_batch(shape, rows=40))
    report.raise_if_different()
    assert (report.shapes_checked, report.axes) == (40, {"ep": 2, "tp": 1})


def follow_in_processes() -> tuple[int, str]:
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    ids, targets = make_batch(SHAPE)
    own = slice(2 * mesh.get_local_rank("ep"), 2 * mesh.get_local_rank("ep") + 2)
    counts = []
    finding = ""
    for fault in (None, gradients_are_no_means):
        model = make_decoder(SHAPE)
        plan = plan_transformer(model, {"ep": 2, "tp": 1}, expert_axis="ep")
        apply_plan(model, plan, mesh, mode="validation")
        if fault is not None:
            fault(model)
        try:
            loss_function(model)(model(ids[own]), targets[own]).backward()
        except PlacementError:
            finding = report_of(model).findings[0].module
        counts.append(len(report_of(model).operations))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return counts[0], finding


@pytest.mark.full
def test_processes_give_the_same_verdicts() -> None:
    found = run_ranks(2, follow_in_processes, timeout=240.0)
    expected = len(followed({"ep": 2, "tp": 1}).operations)
    assert found == [(expected, "layers.1.mlp.experts")] * 2
