"""Faults put into a planned model: each changes code or data that the model runs, and where it lies is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.core.dtensor import applied_plan

Fault = Callable[[nn.Module], None]


def _change(model: nn.Module, name: str, **fields: Any) -> None:
    module = model.get_submodule(name)
    module._hp_boundary = dataclasses.replace(module._hp_boundary, **fields)  # type: ignore[arg-type]


def _outputs(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)._hp_boundary.outputs


def output_sum_is_missing(model: nn.Module) -> None:
    _change(model, "layers.1.mlp", outputs=())


def output_sum_is_doubled(model: nn.Module) -> None:
    [(key, steps)] = _outputs(model, "layers.0.attention")
    _change(model, "layers.0.attention", outputs=((key, (*steps, *steps)),))


def output_is_averaged(model: nn.Module) -> None:
    [(key, steps)] = _outputs(model, "layers.1.attention")
    _change(model, "layers.1.attention", outputs=((key, (*steps, lambda x: x / 2)),))


def input_gradient_is_not_summed(model: nn.Module) -> None:
    _change(model, "layers.1.attention", inputs=())


def router_gradient_is_not_summed(model: nn.Module) -> None:
    _change(model, "layers.0.mlp.router", parameters=())


def head_norm_gradient_is_not_summed(model: nn.Module) -> None:
    _change(model, "layers.0.attention.q_norm", parameters=())


def bias_is_added_by_every_rank(model: nn.Module) -> None:
    _change(model, "layers.1.attention.wo", parameters=())


def shards_are_swapped(model: nn.Module) -> None:
    weight = model.get_submodule("layers.0.attention").wv.weight  # type: ignore[union-attr]
    line = applied_plan(model).lines["tp"]  # type: ignore[union-attr]
    pieces = [torch.empty_like(weight) for _ in range(line.size)]
    dist.all_gather(pieces, weight.detach(), group=line.group)
    with torch.no_grad():
        weight.copy_(pieces[-1 - line.rank])


def lookup_ignores_the_offset(model: nn.Module) -> None:
    line = model.get_submodule("tokens")._hp_boundary.lookup
    _change(model, "tokens", lookup=dataclasses.replace(line, rank=0))


WHOLE: dict[Fault, str] = {
    output_sum_is_missing: "layers.1.mlp",
    output_sum_is_doubled: "layers.0.attention",
    output_is_averaged: "layers.1.attention",
    input_gradient_is_not_summed: "layers.1.attention",
    router_gradient_is_not_summed: "layers.0.mlp",
    head_norm_gradient_is_not_summed: "layers.0.attention",
    bias_is_added_by_every_rank: "layers.1.attention",
    shards_are_swapped: "layers.0.attention",
    lookup_ignores_the_offset: "tokens",
}
"""Faults of a plan without sequence parallelism -> the module in which they lie."""


def norm_gradient_is_not_summed(model: nn.Module) -> None:
    _change(model, "layers.0.norm2", parameters=())


def final_norm_gradient_is_not_summed(model: nn.Module) -> None:
    _change(model, "norm", parameters=())


SEQUENCE: dict[Fault, str | None] = {
    norm_gradient_is_not_summed: "layers.0.norm2",
    final_norm_gradient_is_not_summed: "norm",
}
"""Faults of a plan with sequence parallelism. Norm gradients: the fault of Megatron-LM issue 7452."""
