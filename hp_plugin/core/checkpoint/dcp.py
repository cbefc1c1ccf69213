"""Saving and loading a model and its optimizer with torch's DCP: all or nothing, and on any mesh.

Parameters and optimizer states are DTensors at rest, so DCP reshards them by itself: a checkpoint of 2 x 2 ranks loads
on 1, on 4 x 1, in plain torch FSDP2, and the other way round. What a sharding plan has cut is written with the shape of
the whole tensor too (`placed.py`), and experts that are modules by their numbers in the whole model, so a checkpoint
loads under any other plan. A checkpoint is either whole or absent: it is written beside its final place and renamed
when every rank has finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hp_plugin.core.checkpoint.placed import PlacedTensor, placed_state
from hp_plugin.core.dtensor.applied import applied_plan
from hp_plugin.errors import ConfigurationError, HyperParallelError


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    extra: Mapping[str, Any] | None = None,
    ignore_frozen: bool = False,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Writes a checkpoint directory, on a file system that all ranks share. Every rank of the default group must call.

    Args:
        path: The directory to make. An existing checkpoint there is replaced only once the new one is whole.
        model: A model, sharded or not.
        optimizers: Its optimizer or optimizers.
        extra: Further values (step, data position, ...); those under one key must be the same on every rank.
        ignore_frozen: Leave out parameters that do not require a gradient.
        rename: What a parameter of this rank is called in the checkpoint, where ranks call different ones alike.

    Raises:
        HyperParallelError: If any rank could not write, naming the first such rank and its reason. `path` is as it was.
    """
    rename = _rename(model, rename)
    final = Path(path)
    partial = final.with_name(f".{final.name}.partial")
    failure = _on_rank_zero(lambda: _make_empty(partial))
    if failure is None:
        options = StateDictOptions(ignore_frozen_params=ignore_frozen)
        states: Any = get_state_dict(model, optimizers, options=options)
        model_state, optimizer_state = placed_state(model, *states)
        if rename is not None:
            model_state, optimizer_state = _renamed(model_state, optimizer_state, rename)
            optimizer_state = _with_all_names(optimizer_state)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "extra": dict(extra or {})}
        try:
            dcp.save(state, checkpoint_id=str(partial))
        # A full disk surfaces as many classes, one of which torch derives from BaseException.
        except (Exception, CheckpointException) as error:
            failure = f"{type(error).__name__}: {error}"
    failure = _first_failure(failure)
    if failure is None:
        failure = _on_rank_zero(lambda: _replace(partial, final))
    if failure is not None:
        _on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise HyperParallelError(
            f"checkpoint {final} was not written; nothing is left of it and what was there is unchanged: {failure}"
        )


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    strict: bool = True,
    ignore_frozen: bool = False,
    rename: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint directory in place. Every rank of the default group must call.

    Args:
        path: A directory that `save_checkpoint` made, on this mesh or any other.
        model: The model to fill.
        optimizers: The optimizer or optimizers to fill; give none to load weights only.
        strict: Whether the model's parameter names must be exactly those of the checkpoint.
        ignore_frozen: Leave parameters that do not require a gradient as they are.
        rename: As for `save_checkpoint`.

    Returns:
        The `extra` values of the checkpoint.

    Raises:
        ConfigurationError: If there is no checkpoint at `path`.
    """
    rename = _rename(model, rename)
    if not (Path(path) / ".metadata").is_file():
        raise ConfigurationError(
            f"{path} holds no checkpoint: it has no .metadata file. Give the directory of one save"
        )
    states: Any = get_state_dict(model, optimizers, options=StateDictOptions(ignore_frozen_params=ignore_frozen))
    model_state, optimizer_state = placed_state(model, *states)
    own = [
        {key: list(group[key]) for key in _NAMES if key in group} for group in optimizer_state.get("param_groups", [])
    ]
    back = {}
    if rename is not None:
        back = {rename(name): name for name in _parameter_names(model_state, optimizer_state)}
        model_state, optimizer_state = _renamed(model_state, optimizer_state, rename)
    extra = _stored_extra(path)
    state: dict[str, Any] = {"model": model_state, "extra": extra}
    if optimizers:
        state["optimizer"] = optimizer_state
    dcp.load(state, checkpoint_id=str(path))
    model_state, optimizer_state = state["model"], state.get("optimizer", {})
    if rename is not None:
        model_state, optimizer_state = _renamed(model_state, optimizer_state, lambda name: back.get(name, name))
    for group, names in zip(optimizer_state.get("param_groups", []), own):
        # The file has those of all ranks; what the optimizer itself calls them depends on who holds them.
        group.update(names if rename is not None else {key: names[key] for key in names if key != "params"})
    model_state = _filled(model_state, states[0])
    if "state" in optimizer_state:
        pairs = optimizer_state["state"].items()
        optimizer_state["state"] = {name: _filled(value, states[1]["state"][name]) for name, value in pairs}
    set_state_dict(
        model,
        optimizers,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        # DCP has found every key that it was asked for; those of frozen parameters were not asked for.
        options=StateDictOptions(strict=strict and not ignore_frozen, ignore_frozen_params=ignore_frozen),
    )
    return dict(state["extra"])


def _rename(model: nn.Module, rename: Callable[[str], str] | None) -> Callable[[str], str] | None:
    """`rename`, and before it the names that a plan's experts have in the whole model."""
    applied = applied_plan(model)
    if applied is None or not applied.whole_names:
        return rename
    plan = applied
    return plan.whole_name if rename is None else lambda name: rename(plan.whole_name(name))


def _filled(read: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What was read, with the tensors themselves in the place of those that stood for them in the reading."""
    return {name: own[name] if isinstance(value, PlacedTensor) else value for name, value in read.items()}


def _parameter_names(model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> set[str]:
    groups = optimizer_state.get("param_groups", [])
    return {*model_state, *optimizer_state.get("state", {}), *(name for group in groups for name in group["params"])}


_NAMES = ("params", "param_names")
"""Entries of a parameter group that name its parameters: for the state dict, and for the optimizer itself."""


def _with_all_names(optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
    """Groups that name the parameters of all ranks, since one rank's are written. Every rank must call."""
    groups = optimizer_state.get("param_groups", [])
    everyone: list[Any] = [groups]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [{key: group[key] for key in _NAMES if key in group} for group in groups])
    named = []
    for index, group in enumerate(groups):
        same = [theirs[index] for theirs in everyone if index < len(theirs)]
        united = {key: list(dict.fromkeys(n for g in same for n in g.get(key, ()))) for key in _NAMES if key in group}
        named.append({**group, **united})
    return {**optimizer_state, "param_groups": named} if groups else dict(optimizer_state)


def _renamed(
    model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], rename: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both state dicts with other names of parameters; values are shared."""
    renamed = dict(optimizer_state)
    if "state" in renamed:
        renamed["state"] = {rename(name): value for name, value in renamed["state"].items()}
        renamed["param_groups"] = [
            {**group, **{key: [rename(name) for name in group[key]] for key in _NAMES if key in group}}
            for group in renamed["param_groups"]
        ]
    return {rename(name): value for name, value in model_state.items()}, renamed


def _stored_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of `extra` as the checkpoint has them: DCP fills only what it is asked for."""
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    prefix = "extra."
    return {key[len(prefix) :]: None for key in metadata.state_dict_metadata if key.startswith(prefix)}


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _replace(partial: Path, final: Path) -> None:
    if final.exists():
        old = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)


def _on_rank_zero(action: Any) -> str | None:
    """Runs `action` on rank 0; returns on every rank what went wrong there, or None."""
    failure = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = f"rank 0: {error}"
    return _first_failure(failure)


def _first_failure(failure: str | None) -> str | None:
    """The first rank's failure among all ranks', the same on every rank."""
    if not dist.is_initialized():
        return failure
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((f for f in failures if f is not None), None)
