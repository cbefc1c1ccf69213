"""Rank functions: training in validation mode, with or without a fault."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.deepspeed import training
from tests.deepspeed.training import Run

REPORTS: list[Any] = []


def train(*, config: dict[str, Any], fault: str | None = None, **options: Any) -> tuple[Run | None, str, list[Any]]:
    """The run, or None and what it was refused with; and the reports of the compared steps as dictionaries."""
    training.start()
    from hp_plugin.deepspeed import validation
    from hp_plugin.errors import HyperParallelError

    reports: list[Any] = []
    make = validation.ValidationReport

    def kept(*args: Any) -> Any:
        report = make(*args)
        reports.append(report.to_dict())
        return report

    validation.ValidationReport = kept  # type: ignore[assignment, misc]
    if fault is not None:
        put_later(FAULTS[fault])
    try:
        return training.train(config=config, **options), "", reports
    except HyperParallelError as error:
        return None, f"{type(error).__name__}: {error}", reports


def put_later(fault: Any) -> None:
    """Puts a fault into the engine once the model is sharded."""
    from hp_plugin.deepspeed.engine import HyperFSDPEngine

    broadcast = HyperFSDPEngine._broadcast_model

    def _broadcast_model(self: Any) -> None:
        broadcast(self)
        fault(self)

    HyperFSDPEngine._broadcast_model = _broadcast_model  # type: ignore[method-assign]


def divided_by_another_number(engine: Any) -> None:
    engine.module.set_gradient_divide_factor(1.0)


def one_layer_counts_twice(engine: Any) -> None:
    engine.module.blocks[1].set_gradient_divide_factor(1.0, recurse=False)


def a_micro_batch_is_dropped(engine: Any) -> None:
    """Of one rank, backward of the first block's second product gives nothing to its weight."""
    if engine.global_rank == 1:
        up = engine.module.blocks[0].up
        up.register_forward_hook(lambda module, args, output: output.detach() + 0 * output)


def one_copy_differs(engine: Any) -> None:
    """The forward of one rank adds something."""
    if engine.global_rank == 1:
        engine.module.norm.register_forward_hook(lambda module, args, output: output + 0.01)


def one_shard_is_not_updated(engine: Any) -> None:
    from hp_plugin.core.layout import local_tensor
    from hp_plugin.core.optim import HyperAdamW

    if engine.global_rank != 1:
        return
    weight: nn.Parameter = engine.module.blocks[2].down.weight
    step = HyperAdamW.step

    @torch.no_grad()
    def stale(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = local_tensor(weight).detach().clone()
        result = step(self, *args, **kwargs)
        local_tensor(weight).copy_(before)
        return result

    HyperAdamW.step = stale  # type: ignore[method-assign]


FAULTS = {
    fault.__name__: fault
    for fault in (
        divided_by_another_number,
        one_layer_counts_twice,
        a_micro_batch_is_dropped,
        one_copy_differs,
        one_shard_is_not_updated,
    )
}
