"""Rank functions of the checkpoint tests: train and save on one mesh, load and go on training on another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.fsdp.comparison import Record, full_values
from tests.fsdp.training import TRAINERS, Trainer, continue_training
from tests.fsdp.variants import Variant
from tests.support import init_gloo

SAVED_AFTER = 2  # steps
STEPS = 4


@dataclass
class State:
    """Everything that a checkpoint must carry, in full, by parameter name."""

    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]


@dataclass
class Part:
    """One half of a transfer: the state at the moment of saving or after loading, and the steps trained."""

    state: State
    record: Record


def train_and_save(*, replicate: int, shard: int, jobs: list[tuple[Variant, str, str]]) -> list[Part]:
    """For each (variant, writer, directory): train `SAVED_AFTER` steps and save."""
    mesh = _mesh(replicate, shard)
    parts = []
    for variant, writer, directory in jobs:
        trainer = TRAINERS[variant.backend](variant, mesh)
        record = continue_training(trainer, range(SAVED_AFTER))
        parts.append(Part(state_of(trainer), record))
        SAVERS[writer](directory, trainer)
    return parts


def load_and_train(*, replicate: int, shard: int, jobs: list[tuple[Variant, str, str]]) -> list[Part]:
    """For each (variant, reader, directory): load into a spoilt model and train the remaining steps."""
    mesh = _mesh(replicate, shard)
    parts = []
    for variant, reader, directory in jobs:
        trainer = TRAINERS[variant.backend](variant, mesh)
        _spoil(trainer)
        LOADERS[reader](directory, trainer)
        state = state_of(trainer)
        parts.append(Part(state, continue_training(trainer, range(SAVED_AFTER, STEPS))))
    return parts


def state_of(trainer: Trainer) -> State:
    """The full state of model and optimizer. Every rank must call."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    states = {names[parameter]: state for parameter, state in trainer.optimizer.state.items()}
    values = full_values({f"{name} {key}": value for name, state in states.items() for key, value in state.items()})
    optimizer = {name: {key: values[f"{name} {key}"] for key in state} for name, state in states.items()}
    return State(trainer.weights(), optimizer)


def _mesh(replicate: int, shard: int) -> DeviceMesh:
    init_gloo()
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def _spoil(trainer: Trainer) -> None:
    """Whatever loading does not overwrite must show."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter._local_tensor.fill_(float("nan"))


def _save_with_dcp(directory: str, trainer: Trainer) -> None:
    state = {
        "model": get_model_state_dict(trainer.model),
        "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
    }
    dcp.save(state, checkpoint_id=directory)


def _load_with_dcp(directory: str, trainer: Trainer) -> None:
    model = get_model_state_dict(trainer.model)
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
    set_model_state_dict(trainer.model, model)
    set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer)


def _save_with_ours(directory: str, trainer: Trainer) -> None:
    from hp_plugin.core.checkpoint import save_checkpoint

    save_checkpoint(directory, trainer.model, optimizers=trainer.optimizer, extra={"step": SAVED_AFTER})


def _load_with_ours(directory: str, trainer: Trainer) -> None:
    from hp_plugin.core.checkpoint import load_checkpoint

    extra: dict[str, Any] = load_checkpoint(directory, trainer.model, optimizers=trainer.optimizer)
    if extra != {"step": SAVED_AFTER}:
        raise AssertionError(f"the checkpoint's extra values came back as {extra}")


SAVERS = {"dcp": _save_with_dcp, "ours": _save_with_ours}
LOADERS = {"dcp": _load_with_dcp, "ours": _load_with_ours}
