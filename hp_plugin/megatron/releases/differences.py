"""Functions of megatron.core that have moved, or whose parameters have changed, between the supported releases."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from hp_plugin.errors import UnsupportedError


def unwrapped(module: Any) -> Any:
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


def counts_steps_per_parameter() -> bool:
    """Whether stock's Adam is torch's. The fused ones of Transformer Engine and Apex count steps per group."""
    from megatron.core import optimizer

    known = getattr(optimizer, "USING_PYTORCH_OPTIMIZER", None)
    return bool(optimizer.Adam.__module__.startswith("torch.")) if known is None else bool(known)


@functools.cache
def takes_irregular_grids() -> bool:
    """Whether a `ShardedTensor` may be any slice of its global tensor, as in all supported releases but 0.12."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return hasattr(ShardedTensor, "has_regular_grid")


def groups_in_order(owner: Any, current: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`loaded` parameter groups of a checkpoint, in the order of `current`, those of the optimizer.

    They are matched by their multipliers and overrides. 0.12 has no function for that and takes them in the order in
    which they were saved, which differs between pipeline stages.

    Raises:
        UnsupportedError: On 0.12, the checkpoint lacks a group that the optimizer has.
    """
    match = getattr(owner, "_filter_and_reorder_param_groups", None)
    if match is not None:
        return list(match(current, loaded))
    by_options = {tuple(group.get(name) for name in _GROUP_OPTIONS): group for group in loaded}
    wanted = [tuple(group.get(name) for name in _GROUP_OPTIONS) for group in current]
    missing = [dict(zip(_GROUP_OPTIONS, options)) for options in wanted if options not in by_options]
    if missing:
        raise UnsupportedError(
            f"the checkpoint has no parameter group with {missing[0]}, which this job's optimizer has; use the "
            "arguments of the job that saved it, or --no-load-optim."
        )
    return [by_options[options] for options in wanted]


_GROUP_OPTIONS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells parameter groups apart, in all releases."""


@functools.cache
def _parameters_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
