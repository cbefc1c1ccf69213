"""DeepSpeed's universal layout: `<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt` and one model file.

DeepSpeed loads it with `"checkpoint": {"load_universal": true}` in stages 1, 2 and 3, on any number of ranks. It takes
neither buffers nor frozen parameters from it, and in stage 3 gives the options of the first parameter group to all.
"""

from __future__ import annotations

import math
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hp_plugin.convert import pickles
from hp_plugin.convert.contents import Contents, Stored, number, of_tensor
from hp_plugin.convert.saving import save
from hp_plugin.convert.zero import COUNTERS, OWN_KEYS
from hp_plugin.errors import ConfigurationError, UnsupportedError

LATEST = "latest_universal"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_OLDEST = "0.17.0"


def is_universal(folder: Path) -> bool:
    """Whether a folder is a tag of a universal checkpoint."""
    return (folder / "zero" / "optimizer_state.pt").is_file()


def write(contents: Contents, folder: Path) -> None:
    """Makes `folder`, whole or not at all; tensors are read and written one by one.

    Raises:
        UnsupportedError: The optimizer is none whose state DeepSpeed finds there.
    """
    _check(contents)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "zero").mkdir(parents=True)
    steps = set()
    for name, stored in contents.weights.items():
        place = partial / "zero" / name
        place.mkdir()
        save({"param": stored.as_dtype(torch.float32).read(), "cat_dim": 0}, place / "fp32.pt")
        state = contents.state.get(name, {})
        if name in contents.frozen:
            continue
        for key in _MOMENTS:
            value = state.get(key)
            moment = value.read() if isinstance(value, Stored) else torch.zeros(stored.shape)
            save({"param": moment, "cat_dim": 0}, place / f"{key}.pt")
        step = number(state.get("step", 0.0))
        steps.add(step)
        save(torch.tensor(step), place / "step.pt")
    save(_optimizer(contents, max(steps, default=0.0)), partial / "zero" / "optimizer_state.pt")
    save(_model(contents), partial / _MODEL_FILES[0])
    shutil.copyfile(partial / _MODEL_FILES[0], partial / _MODEL_FILES[1])
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read(folder: Path) -> Contents:
    """What a universal checkpoint holds, of DeepSpeed's converter or of ours.

    Raises:
        ConfigurationError: Files are missing.
        UnsupportedError: It joins several pieces in a way that DeepSpeed alone undoes.
    """
    paths = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
    if not paths:
        raise ConfigurationError(f"{folder} has a folder zero but no file {_MODEL_FILES[0]}; copy it too.")
    model = pickles.load(paths[0])
    shapes = {n: tuple(s) for group in model.get("param_shapes") or () for n, s in group.items()}
    found = Contents("DeepSpeed universal", weights={})
    for path in sorted((folder / "zero").rglob("fp32.pt")):
        name = str(path.parent.relative_to(folder / "zero"))
        found.weights[name] = _stored(path, shapes.get(name))
        state = {k: _stored(path.with_name(f"{k}.pt"), shapes.get(name)) for k in _MOMENTS if _exists(path, k)}
        if state:
            step = pickles.load(path.with_name("step.pt")) if _exists(path, "step") else None
            found.state[name] = {**state, **({} if step is None else {"step": float(step)})}
        else:
            found.frozen.add(name)
    _add_rest(found, folder, model)
    return found


def _add_rest(found: Contents, folder: Path, model: dict[str, Any]) -> None:
    optimizer = pickles.load(folder / "zero" / "optimizer_state.pt")
    inner = optimizer.get("optimizer_state_dict") or {}
    for state in found.state.values():
        if "step" not in state and inner.get("state"):  # stage 3 keeps it here alone
            state["step"] = float(inner["state"][0]["step"])
    names = [list(group) for group in model.get("param_shapes") or ()] or [list(found.state)]
    options = optimizer.get("param_groups") or []
    if len(options) == len(names):
        found.groups = [{**group, "params": own} for group, own in zip(options, names)]
    found.tied = {a: n for a, n in dict(model.get("shared_params") or {}).items() if n in found.weights}
    found.optimizer = "adam" if found.state else None
    module, buffers = model.get("module") or {}, model.get("buffer_names") or ()
    found.buffers = {name: of_tensor(module[name]) for name in buffers if isinstance(module.get(name), torch.Tensor)}
    found.counters = {name: int(model[name]) for name in COUNTERS if name in model}
    found.scheduler = model.get("lr_scheduler")
    found.client = {key: value for key, value in model.items() if key not in OWN_KEYS}


def _exists(path: Path, key: str) -> bool:
    return path.with_name(f"{key}.pt").is_file()


def _stored(path: Path, shape: tuple[int, ...] | None) -> Stored:
    content = pickles.load(path)
    if isinstance(content, dict):
        if content.get("sub_param_shape") or content.get("param_n_sub_params", 1) > 1 or content.get("vocab_tensor"):
            raise UnsupportedError(
                f"{path} is of a parameter that tensor parallelism had cut in parts; only DeepSpeed puts it together."
            )
        content = content["param"]
    if shape is None:
        shape = tuple(content.shape)
    elif math.prod(shape) != content.numel():
        raise ConfigurationError(f"{path} holds {content.numel()} elements, but the parameter has the shape {shape}.")
    return Stored(shape, content.dtype, lambda: _content(path).detach().reshape(shape).contiguous())


def _content(path: Path) -> torch.Tensor:
    content = pickles.load(path)
    tensor: torch.Tensor = content["param"] if isinstance(content, dict) else content
    return tensor


def _check(contents: Contents) -> None:
    if contents.optimizer == "adam":
        return
    if contents.optimizer is None:
        raise UnsupportedError(
            f"{contents.format} has no optimizer state, without which DeepSpeed does not load a universal checkpoint; "
            "use --to safetensors and load the weights before deepspeed.initialize."
        )
    raise UnsupportedError(
        f"{contents.format} has the state of {contents.optimizer_class or contents.optimizer}, but DeepSpeed's "
        "universal layout has Adam's alone (exp_avg, exp_avg_sq); use --to safetensors for the weights, or --to "
        "hyperfsdp."
    )


def _optimizer(contents: Contents, step: float) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in contents.groups] or [{}]
    listed = [{**group, "params": [index]} for index, group in enumerate(groups)]
    state = {index: {"step": torch.tensor(step)} for index in range(len(groups))}
    return {
        "zero_stage": None,
        "overflow": False,
        "dynamic_loss_scale": False,
        "ds_version": _version(),
        "param_groups": listed,
        "optimizer_state_dict": {"state": state, "param_groups": listed},
    }


def _model(contents: Contents) -> dict[str, Any]:
    shapes = {name: torch.Size(s.shape) for name, s in contents.weights.items() if name not in contents.frozen}
    groups = [{n: shapes[n] for n in group["params"] if n in shapes} for group in contents.groups] or [shapes]
    return {
        "module": {name: stored.read() for name, stored in contents.buffers.items()},
        "buffer_names": list(contents.buffers),
        "optimizer": None,
        "param_shapes": groups,
        "shared_params": dict(contents.tied),
        "lr_scheduler": contents.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        **{name: contents.counters.get(name, 0) for name in COUNTERS},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _version(),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        **contents.client,
    }


def _version() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return _OLDEST
