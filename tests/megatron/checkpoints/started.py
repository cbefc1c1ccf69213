"""Rank function: a job of HyperMuon in one process, and the states of its optimizer after it has read a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.megatron import training


def train(*, argv: list[str]) -> dict[str, dict[str, Any]]:
    """Parameter name -> name of a state -> tensor, before the first iteration."""
    from megatron.training import training as loop

    states: dict[str, dict[str, Any]] = {}
    train_loop = loop.train

    @functools.wraps(train_loop)
    def observed(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for group in optimizer.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                states[name] = {key: value.clone() for key, value in optimizer.optimizer.state[parameter].items()}
        return train_loop(forward_step, model, optimizer, *args, **kwargs)

    loop.train = observed
    training.train(argv=argv)
    return states


def saved_states(folder: Path, name: str) -> dict[str, Any]:
    """Every tensor of an iteration folder under `optimizer.state.<name>.`, by parameter, as torch reads it."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    prefix = f"optimizer.state.{name}."
    entries: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(prefix)
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in found.items()}
