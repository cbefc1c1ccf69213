"""Checkpoints in DeepSpeed's folders: `save_dir/tag/hyperfsdp` in torch's distributed format, and `save_dir/latest`.

Parameters and optimizer state are saved as shards, by the name of the parameter, and load on any number of ranks and
supernodes. What DeepSpeed keeps beside them (counters, learning-rate scheduler, the caller's client state) is one more
entry of the same checkpoint, so that a folder is either whole or absent. `latest` is written last.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from hp_plugin.deepspeed import reporting
from hp_plugin.errors import ConfigurationError, UnsupportedError

FOLDER = "hyperfsdp"
LATEST = "latest"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


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
    extra = {"engine": _packed(_engine_state(engine)), **_client_entries(client_state)}
    save_checkpoint(
        folder / FOLDER, engine.module, optimizers=_optimizers(engine), extra=extra, ignore_frozen=skip_frozen
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
        ConfigurationError: There is no checkpoint of that tag.
        UnsupportedError: It is one of ZeRO.
    """
    if tag is None:
        latest = Path(directory, LATEST)
        if not latest.is_file():
            reporting.say(f"{latest} does not exist, so nothing was loaded; give a tag to load a checkpoint by name")
            return None, None
        tag = latest.read_text().strip()
    folder = Path(directory, str(tag))
    _check_folder(folder)
    stored = load_checkpoint(
        folder / FOLDER,
        engine.module,
        optimizers=_optimizers(engine) if optimizer else (),
        strict=strict,
        ignore_frozen=_lacks_frozen(folder, engine.module),
    )
    state = _unpacked(stored["engine"])
    if counters:
        for counter in _COUNTERS:
            setattr(engine, counter, state[counter])
    if scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if optimizer and engine.loss_scaler is not None:
        engine.loss_scaler.load(state.get("loss_scaler"))
    engine.loaded_checkpoint_dp_world_size = state["dp_world_size"]
    client = stored.get(f"client_{dist.get_rank()}", stored["client_0"])
    return str(folder), _unpacked(client)


def _engine_state(engine: Any) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        **{counter: getattr(engine, counter) for counter in _COUNTERS},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scaler": None if engine.loss_scaler is None else engine.loss_scaler.loss_scale.state_dict(),
        "dp_world_size": engine.dp_world_size,
        "mesh": tuple(engine.mesh.shape),
        "optimizer": type(engine.basic_optimizer).__name__ if engine.basic_optimizer is not None else None,
        "config": engine.config,
    }


def _client_entries(client_state: dict[str, Any]) -> dict[str, bytes]:
    """One entry where all ranks gave the same, else one per rank. Every rank must call."""
    mine = _packed(client_state)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(mine).hexdigest())
    rank = dist.get_rank()
    return {f"client_{rank}": mine} if len(set(digests)) > 1 or rank == 0 else {}


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(blob: bytes) -> dict[str, Any]:
    # Written by this job's own save; like DeepSpeed's files it may hold objects of any class.
    found: dict[str, Any] = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=False)
    return found


def _optimizers(engine: Any) -> Any:
    return () if engine.basic_optimizer is None else engine.basic_optimizer


def _lacks_frozen(folder: Path, model: nn.Module) -> bool:
    """Whether a checkpoint was saved without the parameters that do not require a gradient."""
    stored = dcp.FileSystemReader(str(folder / FOLDER)).read_metadata().state_dict_metadata
    return any(not p.requires_grad and f"model.{name}" not in stored for name, p in model.named_parameters())


def _check_folder(folder: Path) -> None:
    if (folder / FOLDER).is_dir():
        return
    if list(folder.glob("*_optim_states.pt")) or list(folder.glob("*_model_states.pt")):
        raise UnsupportedError(
            f"{folder} is a checkpoint of DeepSpeed's own engine, which HyperFSDP cannot read yet; load its weights "
            "with zero_to_fp32.py into the model before deepspeed.initialize, or resume with the stock engine."
        )
    raise ConfigurationError(
        f"{folder} holds no checkpoint of HyperFSDP (no folder {FOLDER} in it); check load_dir and tag."
    )
