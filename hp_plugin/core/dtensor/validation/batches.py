"""The batch of a simulation: a mapping or a tuple, with tensors whose dim 0 counts rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hp_plugin.core.dtensor.placement import shard
from hp_plugin.core.dtensor.plan import ShardingPlan
from hp_plugin.core.dtensor.validation.arrangement import Grid
from hp_plugin.errors import ConfigurationError


def rows_of(batch: Any, plan: ShardingPlan, grid: Grid) -> Any:
    """A rank's own copy of the batch: its rows, where axes of the plan divide it."""
    rows = grid.placing(dict.fromkeys(plan.batch, shard(0)), 1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if plan.batch and (not tensor.ndim or not grid.fits(tensor.shape, rows)):
            raise ConfigurationError(
                f"a tensor of the batch has the shape {tuple(tensor.shape)}, whose dim 0 the axes "
                f"{', '.join(plan.batch)} do not divide; use a batch of a multiple of their ranks."
            )
        return grid.cut(tensor, rows).clone()

    return mapped(batch, cut)


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with each of its tensors changed."""

    def of(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, Mapping):
        return {key: of(value) for key, value in batch.items()}
    return tuple(of(value) for value in batch)


def cloned(batch: Any) -> Any:
    """A copy of the batch."""
    return mapped(batch, torch.Tensor.clone)


def converted(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating-point tensors in another dtype, if any is given."""
    return mapped(batch, lambda t: t if dtype is None or not t.is_floating_point() else t.to(dtype))
