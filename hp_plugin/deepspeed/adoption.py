"""A model that an engine has sharded already and that `deepspeed.initialize` is given again.

HF Trainer does so when `train()` is called a second time. Units, shards and meshes stay as they are; the new engine
brings its own optimizer, scheduler and counters, and the old one must not be used any more.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from hp_plugin.deepspeed import access
from hp_plugin.errors import ConfigurationError


def former_engine(model: nn.Module) -> Any:
    """The engine that has sharded `model`; None where none has."""
    ours = next((parameter for parameter in model.parameters() if access.is_ours(parameter)), None)
    return None if ours is None else access.engine_of(ours)


def check_same(former: Any, model: nn.Module, *, options: Any, compute_dtype: Any) -> None:
    """Raises ConfigurationError where a new engine would have sharded `model` in another way than `former` has."""
    advice = "; build the model anew, and save and load a checkpoint if its weights are wanted."
    if former.module is not model:
        raise ConfigurationError(
            "parameters of this model are shards that belong to the engine of another module; pass that module to "
            f"deepspeed.initialize{advice}"
        )
    if options.mode == "validation":
        raise ConfigurationError(
            '"mode": "validation" compares with the unsharded model, and an earlier engine has sharded this one'
            f"{advice}"
        )
    if former.hyperfsdp != options:
        raise ConfigurationError(
            f'the model is sharded already, as an earlier "hyperfsdp" block said ({former.hyperfsdp!r}), and this one '
            f"differs ({options!r}){advice}"
        )
    if former.compute_dtype != compute_dtype:
        raise ConfigurationError(
            f"the model is sharded already, to compute in {former.compute_dtype or 'the dtype of its weights'}, and "
            f"this configuration says {compute_dtype or 'the dtype of its weights'}{advice}"
        )


def take_over(engine: Any, former: Any) -> None:
    """Makes `engine` the one of `former`'s model. Every rank must call; gradients are dropped."""
    if dist.get_process_group_ranks(engine.seq_data_parallel_group) != sorted(former.mesh.mesh.flatten().tolist()):
        raise ConfigurationError(
            "the model is sharded already, over other ranks than those of this engine's data-parallel group; build "
            "the model anew."
        )
    former.give_up_model()
    engine.mesh, engine.__dict__["experts"] = former.mesh, former.experts
    access.mark_parameters(engine)
