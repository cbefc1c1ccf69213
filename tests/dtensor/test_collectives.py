"""Every conversion carries values from one placement to the other, and gradients back by their duals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hp_plugin import UnsupportedError
from hp_plugin.core.dtensor.collectives import AxisGroup, make_step
from hp_plugin.core.dtensor.placement import AxisPlacement
from tests.support import init_gloo, run_ranks

CONVERSIONS = [
    ("replicate", "copy"),
    ("replicate", "shard(1)"),
    ("replicate", "partial"),
    ("copy", "shard(0)"),
    ("copy", "shard(-1)"),
    ("shard(1)", "copy"),
    ("shard(0)", "copy"),
    ("shard(-1)", "replicate"),
    ("shard(0)", "shard(2)"),
    ("shard(2)", "shard(1)"),
    ("shard(-1)", "shard(2)"),
    ("partial", "replicate"),
    ("partial", "copy"),
    ("partial", "shard(0)"),
    ("partial", "shard(1)"),
]


def laid_out(whole: torch.Tensor, placement: AxisPlacement, line: AxisGroup) -> torch.Tensor:
    """What a rank has of `whole`; summands of it are different on every rank."""
    if placement.is_shard:
        return whole.chunk(line.size, placement.dim)[line.rank].clone()
    if placement.kind != "partial":
        return whole.clone()
    parts = [whole * (rank + 1) for rank in range(line.size - 1)]
    return parts[line.rank] if line.rank < line.size - 1 else whole - sum(parts)


def check(found: torch.Tensor, whole: torch.Tensor, placement: AxisPlacement, line: AxisGroup) -> None:
    if placement.kind == "partial":
        found = found.clone()
        dist.all_reduce(found)
        placement = AxisPlacement("replicate")
    torch.testing.assert_close(found, laid_out(whole, placement, line))


def convert_there_and_back() -> None:
    init_gloo()
    assert dist.group.WORLD is not None
    line = AxisGroup("tp", dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    generator = torch.Generator().manual_seed(0)
    for one, other in CONVERSIONS:
        before, after = AxisPlacement.parse(one), AxisPlacement.parse(other)
        value, gradient = torch.randn(2, 6, 6, 12, generator=generator)[..., :6].contiguous()
        x = laid_out(value, before, line).requires_grad_()
        kept = x.detach().clone()
        step = make_step(before, after, line, "here")
        assert step is not None
        y = step(x)
        check(y.detach(), value, after, line)
        given = laid_out(gradient, after.gradient, line)
        untouched = given.clone()
        y.backward(given)
        assert x.grad is not None
        check(x.grad, gradient, before.gradient, line)
        assert torch.equal(x, kept), "a conversion wrote into its input"
        assert torch.equal(given, untouched), "a conversion wrote into the gradient that it got"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_values_and_gradients_are_converted(ranks: int) -> None:
    run_ranks(ranks, convert_there_and_back)


def identity_steps() -> None:
    init_gloo()
    assert dist.group.WORLD is not None
    alone = AxisGroup("tp", dist.group.WORLD, 1, 0)
    for one, other in CONVERSIONS:
        before, after = AxisPlacement.parse(one), AxisPlacement.parse(other)
        assert make_step(before, after, alone, "here") is None
        assert make_step(after, after, AxisGroup("tp", dist.group.WORLD, 2, 0), "here") is None
    for one, other in [("copy", "replicate"), ("shard(0)", "partial"), ("copy", "partial")]:
        with pytest.raises(UnsupportedError, match=r"here: a boundary cannot convert"):
            make_step(AxisPlacement.parse(one), AxisPlacement.parse(other), alone, "here")


def test_steps_that_do_nothing_are_dropped_and_impossible_ones_refused() -> None:
    run_ranks(1, identity_steps)
