"""Checkpoints of DeepSpeed's ZeRO, stages 1 to 3: `<tag>/*_model_states.pt` and `<tag>/*_optim_states.pt`.

Every rank has written a flat piece of each parameter group. Where a parameter lies in the pieces is told by
`param_slice_mappings` in stages 1 and 2, and follows from the order in `param_shapes` in stage 3. DeepSpeed itself is
not imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from hp_plugin.convert import pickles
from hp_plugin.convert.contents import Contents, Stored, of_tensor
from hp_plugin.convert.zero_pieces import of_stage_3, of_stages_1_and_2
from hp_plugin.errors import ConfigurationError, UnsupportedError

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Everything that DeepSpeed itself puts beside the caller's client state.
OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", *COUNTERS, "dp_world_size"),
    *("mp_world_size", "ds_config", "ds_version", "num_experts", "universal_checkpoint_info"),
    *("sparse_tensor_module_names", "ds_autoep_layers", "autoep_layers", "checkpoint_parallel_dimensions"),
}


def is_zero(folder: Path) -> bool:
    """Whether a folder looks like a tag of DeepSpeed's own engine."""
    return any(folder.glob("*_model_states.pt")) and not (folder / "zero").is_dir()


def read(folder: Path, *, rank: int = 0, exact: bool = False) -> Contents:
    """What a checkpoint of ZeRO holds. Pieces of a parameter are put together when it is read.

    Args:
        folder: Of one tag.
        rank: Whose client state is wanted, where ranks have their own; without such, that of rank 0.
        exact: Unpickle the client state with DeepSpeed's classes, which imports DeepSpeed if it names them.

    Raises:
        ConfigurationError: Files are missing or do not fit one another.
        UnsupportedError: It is of a job with tensor or pipeline parallelism, or of AutoEP.
    """
    _refuse_parallel(folder)
    optimizers = _by_rank(folder, "optim")
    models = _by_rank(folder, "model") or {0: folder / "mp_rank_00_model_states.pt"}
    if not models[min(models)].is_file():
        raise ConfigurationError(f"{folder} has no {models[min(models)].name}; a file of the checkpoint is missing.")
    own = models.get(rank, models[min(models)])
    model = pickles.load(own, exact=exact)
    if any(model.get(key) for key in ("ds_autoep_layers", "autoep_layers")):
        raise UnsupportedError(
            f"{folder} is of a job with AutoEP, whose experts HyperFSDP does not read; convert it with DeepSpeed's "
            "ds_to_universal and load weights with zero_to_fp32."
        )
    found = _of_model(folder, model)
    if not optimizers:
        found.missing.append("there are no optimizer files of ZeRO: weights alone are read")
        return found
    others = [model if path == own else pickles.load(path) for path in models.values()]
    _add_optimizer(found, folder, [pickles.load(path) for path in optimizers.values()], others)
    _add_frozen(found, model, others)
    _add_expert_files(found, folder)
    _resolve_ties(found, model)
    return found


def _refuse_parallel(folder: Path) -> None:
    ranks = {int(m[2]) for path in folder.iterdir() if (m := _RANK.search(path.name))}
    ranks |= {int(m[1]) for path in folder.iterdir() if (m := _MODEL.search(path.name))}
    if ranks - {0}:
        raise UnsupportedError(
            f"{folder} is of a job with tensor parallelism over {len(ranks)} ranks, whose parameters HyperFSDP does "
            "not put together; convert it with DeepSpeed's ds_to_universal, then use that folder as the source."
        )
    if any(path.name.startswith("layer_") and "_expert_" not in path.name for path in folder.glob("layer_*.pt")):
        raise UnsupportedError(
            f"{folder} is of a job with PipelineModule, which HyperFSDP does not support; export its weights with "
            "zero_to_fp32, or keep the stock engine."
        )


def _by_rank(folder: Path, kind: str) -> dict[int, Path]:
    found = {int(m[1]): path for path in folder.iterdir() if (m := _RANK.search(path.name)) and m[3] == kind}
    absent = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if absent:
        raise ConfigurationError(f"{folder} lacks the {kind}_states.pt files of the ranks {absent}; copy them too.")
    return dict(sorted(found.items()))


def _of_model(folder: Path, model: dict[str, Any]) -> Contents:
    """Buffers, counters and what weights a model file has whole."""
    if "module" not in model:
        raise ConfigurationError(f"{folder} holds files that are no model states of DeepSpeed: they have no module.")
    names = set(model.get("buffer_names") or ())
    module = {k: v for k, v in (model["module"] or {}).items() if isinstance(v, torch.Tensor)}
    return Contents(
        "DeepSpeed without ZeRO",
        weights={name: of_tensor(tensor) for name, tensor in module.items() if name not in names and tensor.numel()},
        buffers={name: of_tensor(tensor) for name, tensor in module.items() if name in names},
        counters={name: int(model[name]) for name in COUNTERS if name in model},
        scheduler=model.get("lr_scheduler"),
        client={key: value for key, value in model.items() if key not in OWN_KEYS},
    )


def _add_optimizer(found: Contents, folder: Path, files: list[Any], models: list[Any]) -> None:
    states = [content.get("optimizer_state_dict") for content in files]
    if any(not isinstance(state, dict) for state in states):
        raise ConfigurationError(f"{folder} holds optimizer files that are not of ZeRO; there is no other reader.")
    _check_count(folder, states, len(files))
    stage = 3 if "fp32_flat_groups" in states[0] else _stage(states[0])
    pieces = of_stage_3(states, models[0]) if stage == 3 else of_stages_1_and_2(states, models[0])
    whole = {name: stored for name, stored in found.weights.items() if name not in pieces.shapes}
    found.format = f"ZeRO-{stage} of {len(files)} ranks"
    found.weights = {**{name: pieces.weight(name) for name in pieces.shapes}, **whole}
    found.frozen = set(whole)
    found.state = {name: pieces.state(name) for name in pieces.shapes}
    found.groups = pieces.groups
    for group in pieces.groups:
        for name in group["params"] if "step" in group else ():
            if "exp_avg" in found.state.get(name, {}):
                found.state[name].setdefault("step", float(group["step"]))  # DeepSpeed's fused Adam counts by group
    found.loss_scale = _loss_scale(states[0])
    found.optimizer = _kind(found.state)


def _stage(state: dict[str, Any]) -> int:
    value = state.get("zero_stage", 1)  # BF16_Optimizer, which is ZeRO-1, does not say
    if isinstance(value, pickles.Stub):
        value = value.args[0]
    return int(getattr(value, "value", value))


def _loss_scale(state: dict[str, Any]) -> dict[str, float] | None:
    """The state of fp16's dynamic loss scale."""
    scaler = state.get("loss_scaler")
    values = pickles.values(scaler) if scaler is not None and state.get("dynamic_loss_scale") else {}
    known = isinstance(values, dict) and all(key in values for key in _LOSS_SCALE)
    return {key: values[key] for key in _LOSS_SCALE} if known else None  # type: ignore[call-overload]


def _check_count(folder: Path, states: list[dict[str, Any]], files: int) -> None:
    count = states[0].get("partition_count")
    expected = max(count) if isinstance(count, (list, tuple)) else count
    if expected is not None and int(expected) != files:
        raise ConfigurationError(
            f"{folder} was saved by {int(expected)} ranks but holds optimizer files of {files}; copy all of them. (A "
            "checkpoint of MiCS partitions over fewer ranks than there are; HyperFSDP does not read it.)"
        )


def _kind(state: dict[str, dict[str, Any]]) -> str | None:
    keys = {key for values in state.values() for key in values}
    if "momentum_buffer" in keys:
        return "muon" if "exp_avg" in keys or keys <= {"momentum_buffer", "step"} else "other"
    return "adam" if {"exp_avg", "exp_avg_sq"} <= keys else ("other" if keys else None)


def _add_frozen(found: Contents, model: dict[str, Any], models: list[Any]) -> None:
    """Frozen parameters, which stage 3 keeps in pieces beside the model."""
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        if name in found.weights:
            continue
        parts = [other["frozen_param_fragments"][name] for other in models if other.get("frozen_param_fragments")]
        if parts:
            found.weights[name] = _joined(name, parts, tuple(shape))
            found.frozen.add(name)


def _joined(name: str, parts: list[torch.Tensor], shape: tuple[int, ...]) -> Stored:
    numel = torch.Size(shape).numel()
    if sum(part.numel() for part in parts) < numel:
        raise ConfigurationError(f"the pieces of the frozen parameter {name} are fewer than its {numel} elements.")
    return Stored(shape, parts[0].dtype, lambda: torch.cat([p.detach().view(-1) for p in parts])[:numel].view(shape))


def _add_expert_files(found: Contents, folder: Path) -> None:
    """Experts of `deepspeed.moe` that no optimizer trains stand in files of their own, one for each expert."""
    for path in sorted(folder.glob("layer_*_expert_*_model_states.pt")):
        for name, tensor in pickles.load(path).items():
            if isinstance(tensor, torch.Tensor) and name not in found.weights:
                found.weights[name] = of_tensor(tensor)
                found.frozen.add(name)


def _resolve_ties(found: Contents, model: dict[str, Any]) -> None:
    for alias, name in dict(model.get("shared_params") or {}).items():
        if name in found.weights:
            found.tied[alias] = name
            found.weights.pop(alias, None)
            found.frozen.discard(alias)
