"""A plan computes what one process does: losses, outputs, every gradient, their norm, and weights after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import fully_shard
from hp_plugin.core.dtensor import ValidationReport, plan_transformer, validate
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPES = {
    "dense": Shape(),
    "grouped_queries": Shape(heads=8, key_heads=2, bias=False),
    "tied": Shape(tied=True),
    "head_norms": Shape(head_norms=True, key_heads=2),
    "fused": Shape(fused=True),
    "experts": Shape(experts=4, tied=True),
}


def shard_layers(model: nn.Module, mesh: Any) -> nn.Module:
    assert isinstance(model, Decoder)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(
    *,
    shape: Shape,
    dp: int,
    tp: int,
    sequence_parallel: bool,
    loss_parallel: bool,
    fsdp: bool = False,
    dtype: torch.dtype | None = None,
) -> ValidationReport:
    init_gloo()
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp_shard", "tp"))
    plan = plan_transformer(
        make_decoder(shape), {"tp": tp}, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
    )
    wrap = (lambda model: shard_layers(model, mesh["dp_shard"])) if fsdp else None
    return validate(lambda: make_decoder(shape), plan, mesh, make_batch(shape), data_parallel=wrap, dtype=dtype)


def check(ranks: int, **options: Any) -> ValidationReport:
    reports = run_ranks(ranks, compare, timeout=120.0, **options)
    report: ValidationReport = reports[0]
    report.raise_if_different()
    assert report.location is None
    assert all(other.comparisons == report.comparisons for other in reports)
    print(report)
    return report


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=pytest.mark.full)])
def test_two_tensor_parallel_ranks_equal_one(name: str, sequence_parallel: bool) -> None:
    check(2, shape=SHAPES[name], dp=1, tp=2, sequence_parallel=sequence_parallel, loss_parallel=sequence_parallel)


@pytest.mark.full
@pytest.mark.parametrize("loss_parallel", [False, True], ids=["gathered", "loss_parallel"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_structure_equals_one_process(name: str, sequence_parallel: bool, loss_parallel: bool) -> None:
    check(2, shape=SHAPES[name], dp=1, tp=2, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)


def test_tensor_parallel_under_fully_shard_equals_one_process() -> None:
    check(4, shape=SHAPES["tied"], dp=2, tp=2, sequence_parallel=True, loss_parallel=True, fsdp=True)


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [False, True], ids=["averaged", "fully_shard"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1)], ids=lambda s: f"dp{s[0]}_tp{s[1]}")
@pytest.mark.parametrize("name", ["dense", "experts", "tied"])
def test_every_mesh_equals_one_process(name: str, sizes: tuple[int, int], fsdp: bool) -> None:
    dp, tp = sizes
    check(dp * tp, shape=SHAPES[name], dp=dp, tp=tp, sequence_parallel=True, loss_parallel=True, fsdp=fsdp)


@pytest.mark.full
def test_in_double_precision_the_difference_is_rounding_of_doubles() -> None:
    report = check(
        2, shape=SHAPES["dense"], dp=1, tp=2, sequence_parallel=True, loss_parallel=True, dtype=torch.float64
    )
    assert report.largest_error("gradient") < 1e-13
