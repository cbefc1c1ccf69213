"""Plans of more ranks than can be simulated with values: shapes on all ranks, values on two per axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_plugin import ConfigurationError
from hp_plugin.core.dtensor import ShardingPlan, plan_transformer, simulate
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.dtensor.validation.operations import Block, Model, square_loss

WIDTH = 384

# One dim is cut by two axes, `a` first: 2 * WIDTH rows over a x b ranks.
TWO_AXES = """
axes: {a: %d, b: %d}
modules:
  norm: {parameters: {weight: {}, bias: {}}}
  block:
    inputs: {x: {arrives: {}, needs: {a: copy, b: copy}}}
    outputs: {output: {produces: {a: partial, b: partial}, leaves: {}}}
    parameters:
      up.weight: {held: {a: shard(0), b: shard(0)}}
      up.bias: {held: {a: shard(0), b: shard(0)}}
      down.weight: {held: {a: shard(1), b: shard(1)}}
      scale: {held: {a: shard(0), b: shard(0)}}
"""


def make() -> Model:
    torch.manual_seed(0)
    model = Model(lambda block, x: F.silu(x) * block.scale)
    model.norm, model.block = nn.LayerNorm(WIDTH), Block(model.block.body, WIDTH)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)), torch.empty(0)


@pytest.mark.parametrize(
    "sizes", [(2, 2), (8, 16), pytest.param((12, 64), marks=pytest.mark.full)], ids=["4", "128", "768"]
)
def test_two_axes_of_up_to_768_ranks(sizes: tuple[int, int]) -> None:
    plan = ShardingPlan.from_yaml(TWO_AXES % sizes)
    report = simulate(make, plan, batch(), loss_fn=square_loss)
    report.raise_if_different()
    assert report.planned_axes == {"a": sizes[0], "b": sizes[1]}
    assert report.axes == {"a": 2, "b": 2}
    is_large = sizes[0] * sizes[1] > 32
    assert report.shapes_checked == (sizes[0] * sizes[1] if is_large else 0)
    placements = {(o.module, o.op): o.placements for o in report.operations}
    assert placements["block.up", "linear"] == ("a: shard(2), b: shard(2)",)
    assert placements["block.down", "linear"] == ("a: partial, b: partial",)
    if is_large:
        assert f"shapes on all {report.shapes_checked} ranks" in str(report)


@pytest.mark.parametrize("ranks", [64, pytest.param(128, marks=pytest.mark.full)])
def test_a_transformer_of_many_ranks(ranks: int) -> None:
    shape = Shape(heads=ranks, key_heads=ranks, width=2 * ranks, vocabulary=2 * ranks, sequence=ranks, layers=1)
    plan = plan_transformer(make_decoder(shape), {"tp": ranks}, sequence_parallel=True, loss_parallel=True)
    report = simulate(lambda: make_decoder(shape), plan, make_batch(shape, rows=2))
    report.raise_if_different()
    assert (report.shapes_checked, report.axes) == (ranks, {"tp": 2})


def test_a_size_that_fits_two_ranks_and_not_all_is_found() -> None:
    """A sequence of 40 is divided by 2, not by 64."""
    shape = Shape(heads=64, key_heads=64, width=128, vocabulary=128, sequence=40, layers=1)
    plan = plan_transformer(make_decoder(shape), {"tp": 64}, sequence_parallel=True)
    report = simulate(lambda: make_decoder(shape), plan, make_batch(shape))
    [finding] = report.findings
    assert (finding.kind, finding.axis) == ("shape", "tp")
    assert "40 is not a multiple of 64" in str(finding)
    assert finding.module == "layers.0"


def test_a_body_that_does_not_divide_its_counts_is_found_by_shapes() -> None:
    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], 2 * WIDTH // 4, 4).flatten(-2)  # the sizes of one process

    def wrong() -> Model:
        model = make()
        model.block.body = body
        return model

    report = simulate(wrong, ShardingPlan.from_yaml(TWO_AXES % (8, 16)), batch(), loss_fn=square_loss)
    [finding] = report.findings
    assert (finding.kind, finding.module) == ("shape", "block")


def test_parameters_that_an_axis_does_not_divide_are_refused_as_by_apply_plan() -> None:
    with pytest.raises(ConfigurationError, match=r"axis b with 5 ranks does not"):
        simulate(make, ShardingPlan.from_yaml(TWO_AXES % (2, 5)), batch(), loss_fn=square_loss)
