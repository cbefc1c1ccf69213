"""Full weights on rank 0, one parameter in full at a time."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.deepspeed import reporting
from hp_plugin.deepspeed.access import full_value
from hp_plugin.deepspeed.experts import Experts


@torch.no_grad()
def full_state_dict(
    module: nn.Module, *, dtype: torch.dtype | None, experts: Experts, skip_frozen: bool = False
) -> OrderedDict[str, torch.Tensor] | None:
    """The state dict of the unsharded model, on the host; None on other ranks than 0. Every rank must call.

    Args:
        module: The model.
        dtype: Of floating parameters; None leaves them as they are. Buffers keep theirs.
        experts: Of the model; those of all ranks are in the result, under their numbers in the layer.
        skip_frozen: Leave out parameters that do not require a gradient.

    Tied parameters share one tensor, as in the model.
    """
    is_writer = dist.get_rank() == 0
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    copies: dict[int, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if skip_frozen and name in frozen:
            continue
        if id(value) in copies:
            found[name] = copies[id(value)]
            continue
        for each, full in experts.full_values(name, value, full_value(value)):
            if not is_writer:
                continue
            wanted = dtype if name in parameters and full.is_floating_point() and dtype is not None else full.dtype
            found[each] = copies[id(value)] = full.detach().to("cpu", wanted, copy=True)
    return found if is_writer else None


def save_full_weights(engine: Any, directory: str, filename: str, *, skip_frozen: bool) -> bool:
    """See `HyperFSDPEngine.save_16bit_model`."""
    path = Path(directory, filename)
    if not engine.zero_gather_16bit_weights_on_model_save():
        reporting.say(f"{path} is not written: stage3_gather_16bit_weights_on_model_save is false")
        return False
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=skip_frozen)
    if state is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        torch.save(state, partial)
        os.replace(partial, path)
    dist.barrier()
    return True
