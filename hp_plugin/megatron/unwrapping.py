"""Taking Megatron's wrappers off a model: its own function for that has moved between releases."""

from __future__ import annotations

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
