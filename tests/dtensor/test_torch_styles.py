"""Plans made from torch's parallel styles equal one process, and what a plan cannot say is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from hp_plugin import ConfigurationError, UnsupportedError
from hp_plugin.core.dtensor import ShardingPlan, ValidationReport, plan_from_styles, plan_transformer, validate
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPE = Shape(head_norms=True, key_heads=2)


def sequence_styles() -> dict[str, ParallelStyle]:
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "layers.*.norm?": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gather),  # type: ignore[arg-type]
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp": PrepareModuleInput(**gather),  # type: ignore[arg-type]
        "layers.*.mlp.w[13]": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    }


class _Own(ColwiseParallel):
    """A style that torch does not have."""


def whole_styles() -> dict[str, ParallelStyle]:
    """Products alone: the MLP is divided, the attention is not."""
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.mlp.w[13]": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(),
        "positions": ColwiseParallel(output_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def make_plan(model: nn.Module, styles: dict[str, ParallelStyle], **options: Any) -> ShardingPlan:
    return plan_from_styles(model, styles, {"tp": 2}, **options)


COUNTS = {"layers.*.attention": ("n_heads", "n_kv_heads")}


def compare(*, sequence: bool) -> ValidationReport:
    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {"divides": COUNTS, "logits": Shard(-1)} if sequence else {}
    plan = make_plan(make_decoder(SHAPE), sequence_styles() if sequence else whole_styles(), **options)
    return validate(lambda: make_decoder(SHAPE), plan, mesh, make_batch(SHAPE))


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.full)], ids=["sequence", "whole"])
def test_plan_from_styles_equals_one_process(sequence: bool) -> None:
    run_ranks(2, compare, timeout=120.0, sequence=sequence)[0].raise_if_different()


def test_styles_place_parameters_as_the_planner_does() -> None:
    model = Decoder(SHAPE)
    ours = plan_transformer(model, {"tp": 2}, sequence_parallel=True, loss_parallel=True).placed_parameters()
    theirs = make_plan(model, sequence_styles(), divides=COUNTS, logits=Shard(-1)).placed_parameters()
    assert {name: (e.held, e.in_use) for name, e in theirs.items()} == {n: (e.held, e.in_use) for n, e in ours.items()}


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        ({"layer.*": SequenceParallel()}, "'layer.*' matches no module"),
        ({"norm": SequenceParallel(), "nor?": SequenceParallel()}, "module norm is matched twice"),
        ({"norm": ColwiseParallel()}, "module norm is a LayerNorm"),
        ({"output": ColwiseParallel(output_layouts=Partial())}, "the output of output is placed as"),
        ({"norm": _Own()}, "which a plan cannot be made from"),
        (
            {"layers.0.attention.w[qkv]": ColwiseParallel(), "layers.0.attention.wo": RowwiseParallel()},
            "module layers.0.attention.q_norm has parameters and no style",
        ),
        (
            {"norm": PrepareModuleOutput(output_layouts=(Shard(1),) * 2, desired_output_layouts=(Shard(1),) * 2)},
            "PrepareModuleOutput of several outputs",
        ),
    ],
)
def test_styles_that_a_plan_cannot_say_are_refused(styles: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=re.escape(message)):
        make_plan(Decoder(SHAPE), styles)
