"""Functions of megatron.core that have moved, or whose parameters have changed, between the supported releases."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside data-parallel wrappers and `Float16Module`, whichever of them there are.

    As Megatron's `unwrap_model`, which is in `megatron.core.utils` from 0.13 on and was in `megatron.training` before.
    """
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer.module import Float16Module

    while isinstance(module, (_BaseDataParallel, Float16Module)):
        module = module.module
    return module


def is_tensor_parallel_duplicate(parameter: torch.Tensor, **groups: Any) -> bool:
    """Whether another tensor-parallel rank holds the same parameter and counts it.

    Args:
        parameter: With Megatron's attributes.
        **groups: `tp_group` and `expert_tp_group`. 0.12 takes neither and goes by its global group; only 0.19 takes the
            second.
    """
    from megatron.core import tensor_parallel

    ask = tensor_parallel.param_is_not_tensor_parallel_duplicate
    taken = _parameters_of(ask)
    return not ask(parameter, **{name: group for name, group in groups.items() if name in taken})


def decouples_weight_decay(config: Any) -> bool:
    """Whether Adam is AdamW, by Megatron's `OptimizerConfig`. 0.12 has no choice: it always is."""
    return bool(getattr(config, "decoupled_weight_decay", True))


@functools.cache
def _parameters_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
