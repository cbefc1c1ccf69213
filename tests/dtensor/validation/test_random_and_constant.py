"""Random numbers are replayed, and tensors whose values fit several placements are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_plugin import UnsupportedError
from hp_plugin.core.dtensor import plan_transformer, simulate
from hp_plugin.core.dtensor.validation.perturb import perturb_constants
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.dtensor.validation.operations import followed, inputs, placements
from tests.dtensor.validation.test_unknown_operations import SumOverRanks


def test_dropout_of_divided_activations_is_replayed() -> None:
    """Ranks drop different elements of their pieces; one process drops the elements that all of them do."""
    report = followed(lambda block, x: F.dropout(x, 0.5))
    assert placements(report, "dropout") == ("tp: shard(2)",)
    assert [o.how for o in report.operations if o.op == "dropout"] == ["random"]


def test_dropout_inside_of_modules_in_place_and_off() -> None:
    assert placements(followed(lambda block, x: F.dropout(x * 1, 0.3, inplace=True)), "dropout") == ("tp: shard(2)",)
    report = followed(lambda block, x: F.dropout(x, 0.5, training=False))
    assert [o.how for o in report.operations if o.op == "dropout"] != ["random"]
    report.raise_if_different()


def test_noise_is_replayed() -> None:
    assert placements(followed(lambda block, x: x + torch.randn_like(x)), "randn_like") == ("tp: shard(2)",)
    assert placements(followed(lambda block, x: x * torch.rand(x.shape, dtype=x.dtype)), "rand") == ("tp: shard(2)",)
    assert placements(followed(lambda block, x: x * torch.rand(6, 1, dtype=x.dtype)), "rand") == ("tp: replicate",)


class Dropped(nn.Module):
    """Drops elements of the residual stream, which all ranks hold: they must drop the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.draws_before = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(x))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "apart"])
def test_ranks_that_hold_one_tensor_must_drop_alike(alike: bool) -> None:
    from hp_plugin.core.dtensor import ShardingPlan, applied_plan

    plan = ShardingPlan.from_yaml("axes: {tp: 2}\nmodules: {first: {parameters: {weight: {}, bias: {}}}}")

    def spoil(model: Any) -> None:
        rank = applied_plan(model).lines["tp"].rank  # type: ignore[union-attr]
        if rank and not alike:
            model.drop.p = 0.4  # other numbers, as of a rank that is seeded otherwise

    report = simulate(
        lambda: Dropped().double(),
        plan,
        inputs(),
        loss_fn=lambda m, b: m(b[0]).square().mean(),
        after_apply=spoil,
    )
    if alike:
        report.raise_if_different()
        return
    [finding] = report.findings
    assert (finding.module, finding.op, finding.kind, finding.axis) == ("drop", "dropout", "random", "tp")


def test_random_numbers_inside_of_a_kernel_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="module block: rrelu draws random numbers inside"):
        followed(lambda block, x: F.rrelu(x, training=True))


def test_zeros_become_what_is_added_to_them() -> None:
    """A buffer of zeros fits any placement; what is written into it decides."""

    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[:, 1:] += x[:, 1:]
        out[0] = x[0]
        return out

    report = followed(body)
    report.raise_if_different()
    total = followed(lambda block, x: x + 0 * x.sum(-1, keepdim=True).detach())  # a partial sum times zero
    total.raise_if_different()


def test_what_is_written_through_a_view_changes_the_placement_of_the_whole() -> None:
    """Zeros of every rank become a copy, whose gradient is a partial sum, without being named as an output."""

    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        total = SumOverRanks.apply(x.square().sum(-1, keepdim=True), block.line, True)
        out = torch.zeros_like(total).detach()
        part = out[:, 1:]
        part.copy_(total[:, 1:])
        return x * torch.rsqrt(1 + out) * block.scale

    followed(body).raise_if_different()


def test_memory_that_was_not_written_is_no_finding() -> None:
    def body(block: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[...] = x
        return out + x.new_empty(1).zero_()

    followed(body).raise_if_different()


def test_constants_are_perturbed_so_that_they_hide_no_fault() -> None:
    """A bias of zeros may be added by every rank, and nobody sees it."""
    from tests.dtensor import faults

    def at_the_start() -> nn.Module:
        model = make_decoder(Shape(layers=2))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
        return model

    plan = plan_transformer(at_the_start(), {"tp": 2})
    report = simulate(at_the_start, plan, make_batch(), after_apply=faults.bias_is_added_by_every_rank)
    assert report.location == "layers.1.attention.wo"
    simulate(at_the_start, plan, make_batch()).raise_if_different()


def test_only_constants_are_perturbed() -> None:
    layer = nn.LayerNorm(4)
    linear = nn.Linear(4, 4)
    before = linear.weight.detach().clone()
    perturb_constants(nn.Sequential(layer, linear))
    assert torch.equal(linear.weight, before)
    assert len(set(layer.weight.tolist())) == 4
    assert len(set(layer.bias.tolist())) == 4
