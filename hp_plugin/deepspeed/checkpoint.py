"""Checkpoints in DeepSpeed's folders: `save_dir/tag/hyperfsdp` in torch's distributed format, and `save_dir/latest`.

Parameters and optimizer state are saved as shards, by the name of the parameter, and load on any number of ranks and
supernodes. What DeepSpeed keeps beside them (counters, learning-rate scheduler, the caller's client state) is one more
entry of the same checkpoint, so that a folder is either whole or absent. `latest` is written last.

Checkpoints of ZeRO, of DeepSpeed's universal layout and of another optimizer are read through `hp_plugin.convert`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hp_plugin.convert import hyperfsdp, universal, zero
from hp_plugin.convert.contents import Contents
from hp_plugin.convert.hyperfsdp import COUNTERS, FOLDER, packed, unpacked
from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from hp_plugin.deepspeed import foreign, reporting
from hp_plugin.errors import ConfigurationError

LATEST = "latest"


def save(
    engine: Any, directory: str, tag: str | None, client_state: dict[str, Any], *, save_latest: bool, skip_frozen: bool
) -> bool:
    """Writes a checkpoint; see `HyperFSDPEngine.save_checkpoint`.

    Args:
        engine: The engine.
        directory: On a file system that all ranks share.
        tag: Name of the folder; None is `global_step<N>`. The same on every rank.
        client_state: The caller's own values, which each rank gets back as it gave them.
        save_latest: Whether `latest` shall name this checkpoint.
        skip_frozen: Leave out parameters that do not require a gradient.

    Raises:
        ValueError: No directory was given.
        HyperParallelError: A rank could not write; what was there before is unchanged.
    """
    if not directory:
        raise ValueError(f"save_dir must be a non-empty string, got {directory!r}")
    name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    engine._checkpoint_tag_validation(name)
    folder = Path(directory, name)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    extra = {"engine": packed(_engine_state(engine)), **_client_entries(client_state)}
    save_checkpoint(
        folder / FOLDER,
        engine.module,
        optimizers=_optimizers(engine),
        extra=extra,
        ignore_frozen=skip_frozen,
        rename=engine.experts.global_name if engine.experts.groups else None,
    )
    if save_latest and dist.get_rank() == 0:
        partial = Path(directory, f".{LATEST}.partial")
        partial.write_text(name)
        os.replace(partial, Path(directory, LATEST))
    dist.barrier()
    return True


def load(
    engine: Any, directory: str, tag: str | None, *, strict: bool, optimizer: bool, scheduler: bool, counters: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Reads a checkpoint; see `HyperFSDPEngine.load_checkpoint`.

    Args:
        engine: The engine, on any mesh.
        directory: What `save` was given.
        tag: Of the checkpoint; None is what `latest` names.
        strict: Whether the model's parameter names must be those of the checkpoint.
        optimizer: Load its state too.
        scheduler: Load the learning-rate scheduler too.
        counters: Load the numbers of steps and samples too.

    Returns:
        The folder of the checkpoint and this rank's client state; (None, None) where there is no `latest`.

    Raises:
        ConfigurationError: There is no checkpoint of that tag, or it does not fit the model or the optimizer.
        UnsupportedError: It is one of ZeRO that cannot be read.
    """
    if tag is None:
        names = (universal.LATEST, LATEST) if engine.load_universal_checkpoint() else (LATEST, universal.LATEST)
        latest = next((path for name in names if (path := Path(directory, name)).is_file()), None)
        if latest is None:
            reporting.say(
                f"{Path(directory, names[0])} does not exist, so nothing was loaded; give a tag to load a checkpoint "
                "by name"
            )
            return None, None
        tag = latest.read_text().strip()
    folder = Path(directory, str(tag))
    optimizer = optimizer and engine.basic_optimizer is not None
    contents = _other_contents(engine, folder, optimizer=optimizer)
    if contents is None:
        return str(folder), _load_own(
            engine, folder, strict=strict, optimizer=optimizer, scheduler=scheduler, counters=counters
        )
    reporting.say(f"{folder} is a checkpoint of {contents.format}")
    foreign.fill_weights(engine, contents, strict=strict)
    if optimizer:
        foreign.fill_optimizer(engine, contents)
        if engine.loss_scaler is not None:
            engine.loss_scaler.load(contents.loss_scale)
    state = {**contents.counters, "lr_scheduler": contents.scheduler}
    _load_engine_state(engine, state, scheduler=scheduler, counters=counters)
    return str(folder), contents.clients.get(dist.get_rank(), contents.client)


def _other_contents(engine: Any, folder: Path, *, optimizer: bool) -> Contents | None:
    """What a checkpoint holds that is not read shard by shard; None for one of this engine and optimizer."""
    if (folder / FOLDER).is_dir():
        state = hyperfsdp.engine_state(folder)
        is_same = state.get("optimizer") == type(engine.basic_optimizer).__name__ and "converted" not in state
        return hyperfsdp.read(folder) if optimizer and not is_same else None
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} does not exist; check load_dir and tag.")
    if universal.is_universal(folder):
        return universal.read(folder)
    if zero.is_zero(folder):
        return zero.read(folder, rank=dist.get_rank(), exact=True)
    raise ConfigurationError(
        f"{folder} holds no checkpoint of HyperFSDP (no folder {FOLDER} in it) and none of ZeRO; check load_dir and "
        "tag."
    )


def _load_own(
    engine: Any, folder: Path, *, strict: bool, optimizer: bool, scheduler: bool, counters: bool
) -> dict[str, Any]:
    stored = load_checkpoint(
        folder / FOLDER,
        engine.module,
        optimizers=_optimizers(engine) if optimizer else (),
        strict=strict,
        ignore_frozen=_lacks_frozen(folder, engine),
        rename=engine.experts.global_name if engine.experts.groups else None,
    )
    state = unpacked(stored["engine"])
    if optimizer and engine.loss_scaler is not None:
        engine.loss_scaler.load(state.get("loss_scaler"))
    _load_engine_state(engine, state, scheduler=scheduler, counters=counters)
    return unpacked(stored.get(f"client_{dist.get_rank()}", stored["client_0"]))


def _load_engine_state(engine: Any, state: dict[str, Any], *, scheduler: bool, counters: bool) -> None:
    if counters:
        for counter in COUNTERS:
            if counter in state:
                setattr(engine, counter, state[counter])
    if scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    engine.loaded_checkpoint_dp_world_size = state.get("dp_world_size", engine.dp_world_size)


def _engine_state(engine: Any) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scaler": None if engine.loss_scaler is None else engine.loss_scaler.loss_scale.state_dict(),
        "dp_world_size": engine.dp_world_size,
        "mesh": tuple(engine.mesh.shape),
        "optimizer": type(engine.basic_optimizer).__name__ if engine.basic_optimizer is not None else None,
        "config": engine.config,
        "tied": _tied(engine.module),
        "buffers": sorted(name for name, _ in engine.module.named_buffers()),
    }


def _tied(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _client_entries(client_state: dict[str, Any]) -> dict[str, bytes]:
    """One entry where all ranks gave the same, else one per rank. Every rank must call."""
    mine = packed(client_state)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(mine).hexdigest())
    rank = dist.get_rank()
    return {f"client_{rank}": mine} if len(set(digests)) > 1 or rank == 0 else {}


def _optimizers(engine: Any) -> Any:
    return () if engine.basic_optimizer is None else engine.basic_optimizer


def _lacks_frozen(folder: Path, engine: Any) -> bool:
    """Whether a checkpoint was saved without the parameters that do not require a gradient."""
    stored = dcp.FileSystemReader(str(folder / FOLDER)).read_metadata().state_dict_metadata
    frozen = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
    return any(f"model.{engine.experts.global_name(name)}" not in stored for name in frozen)
