"""Small planned models around one operation, for tests of how operations are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor import ShardingPlan, SimulationReport, applied_plan, simulate

Body = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A product by columns, something in between on divided activations, and a product by rows."""

    def __init__(self, body: Body, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.rand(2 * width) + 0.5)
        self.body = body
        self.rank = 0
        self.line: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.body(self, self.up(x)))


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.block = Block(body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(self.norm(x))


PLAN = """
axes: {tp: 2}
modules:
  norm: {parameters: {weight: {}, bias: {}}}
  block:
    inputs: {x: {arrives: {}, needs: {tp: copy}}}
    outputs: {output: {produces: {tp: partial}, leaves: {}}}
    parameters:
      up.weight: {held: {tp: shard(0)}}
      up.bias: {held: {tp: shard(0)}}
      down.weight: {held: {tp: shard(1)}}
      scale: {held: {tp: shard(0)}}
"""


def make(body: Body) -> Model:
    torch.manual_seed(0)
    return Model(body).double()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, 8, generator=generator, dtype=torch.float64), torch.empty(0)


def square_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    result: torch.Tensor = model(batch[0]).square().mean()
    return result


def with_rank(model: nn.Module) -> None:
    """Tells the block where it is, as a module that communicates or is wrong on one rank would know."""
    block: Any = model.get_submodule("block")
    block.line = applied_plan(model).lines["tp"]  # type: ignore[union-attr]
    block.rank = block.line.rank


def followed(body: Body, *, ranks: int = 2, after_apply: Any = with_rank, **options: Any) -> SimulationReport:
    """Follows a model whose block does `body`."""
    plan = ShardingPlan.from_yaml(PLAN.replace("tp: 2", f"tp: {ranks}", 1))
    return simulate(
        lambda: make(body), plan, inputs(), loss_fn=square_loss, after_apply=after_apply, timeout_s=60.0, **options
    )


def placements(report: SimulationReport, op: str) -> tuple[str, ...]:
    """Where the outputs of the only operation of this name lie; nothing may have been found."""
    report.raise_if_different()
    [found] = [o for o in report.operations if o.op == op]
    assert not found.note
    return found.placements
