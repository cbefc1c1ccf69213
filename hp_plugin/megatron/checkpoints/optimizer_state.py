"""Optimizer state in `torch_dist` checkpoints, in the formats of Megatron's optimizers.

The two of optimizers without sharding are here, those of the distributed optimizer in `distributed_format`.

fp32 compute, as `FP32Optimizer`:

    {"state": {index: {name: tensor}, "common_step": step}, "param_groups": [...]}

bf16 or fp16 compute, as `Float16OptimizerWithFloat16Params`: the same under `"optimizer"`, the fp32 masters as lists
per group under `"fp32_from_fp16_params"`, and the loss scale under `"grad_scaler"`. Every tensor is keyed by its
parameter, `optimizer.state.<name>.<parameter>`, so it can be read for any data-, tensor- and pipeline-parallel layout.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints import distributed_format
from hp_plugin.megatron.checkpoints.model_state import Source, sources, write_into
from hp_plugin.megatron.checkpoints.slices import cut
from hp_plugin.megatron.releases.differences import counts_steps_per_parameter, groups_in_order

_STATE = "optimizer.state"
_MASTERS = "fp32_from_fp16_params"


def sharded_state_dict(
    owner: Any,
    model_sharded_state_dict: dict[str, Any],
    *,
    is_loading: bool,
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of `owner`, a `ShardOptimizer`, described for saving or loading. No communication.

    Args:
        owner: The optimizer.
        model_sharded_state_dict: State dict whose model entries were made by HyperFSDP's `sharded_state_dict`.
        is_loading: Create states that do not exist yet, so that there is something to read into.
        metadata: Of the checkpoint. Where it names a format of the distributed optimizer, that is read or written.

    Raises:
        UnsupportedError: A parameter of the optimizer is not in the model's state dict, or the format cannot be read.
    """
    if owner.optimizer is None:
        return {}
    if is_loading:
        _initialise(owner)
    found = sources(model_sharded_state_dict)
    of = [_source(found, parameter, index) for index, parameter in enumerate(owner.parameters)]
    distributed = distributed_format.format_of(metadata)
    if distributed is not None and is_loading:
        return distributed_format.describe_for_loading(owner, of, distributed, metadata or {})
    inner = _inner(owner, of)
    if distributed is not None:
        return distributed_format.describe_for_saving(owner, of, distributed, inner)
    if not _keeps_masters(owner):
        return inner
    result = {"optimizer": inner, _MASTERS: _masters(owner, of, is_loading=is_loading)}
    if owner.grad_scaler is not None:
        result["grad_scaler"] = owner.grad_scaler.state_dict()
    return result


@torch.no_grad()
def load_state_dict(owner: Any, state_dict: dict[str, Any]) -> None:
    """Take over a loaded state, in the form of :func:`sharded_state_dict`. Every rank must call.

    Communicates only where one rank has read for all (`gathered_space`).

    Raises:
        KeyError: The state of a parameter is missing.
    """
    if owner.optimizer is None:
        return
    inner = state_dict
    if distributed_format.is_distributed(state_dict):
        inner = distributed_format.as_plain(owner, state_dict)
        if owner.grad_scaler is not None and "grad_scaler" in state_dict:
            owner.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        for index, value in inner["masters"].items():
            write_into(owner.parameters[index], value, f"the fp32 weight of parameter {index}")
    elif _keeps_masters(owner):
        inner = state_dict["optimizer"]
        if owner.grad_scaler is not None and "grad_scaler" in state_dict:
            owner.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        for masters, group in zip(state_dict[_MASTERS], _indices(owner)):
            for value, index in zip(masters, group):
                write_into(owner.parameters[index], value, f"the fp32 weight of parameter {index}")
    _initialise(owner)
    _load_groups(owner, inner["param_groups"])
    _load_states(owner, inner)


def _inner(owner: Any, of: list[Source]) -> dict[str, Any]:
    state: dict[Any, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    for index, (master, source) in enumerate(zip(owner.masters, of)):
        values = owner.optimizer.state.get(master)
        if not values:
            continue
        steps[index] = values
        state[index] = {
            name: cut(source.template, source.held, local_tensor(value), prefix=f"{_STATE}.{name}")
            for name, value in values.items()
            if _is_per_element(value, source)
        }
    groups = []
    for group, indices in zip(owner.optimizer.param_groups, _indices(owner)):
        options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        groups.append({**options, "params": LocalNonpersistentObject(indices)})
    step = owner._extract_common_per_param_step({"state": steps})
    if step is not None and float(step) > 0:
        if counts_steps_per_parameter():
            state["common_step"] = torch.as_tensor(step, dtype=torch.float32).detach().cpu().clone()
        else:  # the fused Adam of Transformer Engine and Apex counts steps per group
            for group in groups:
                group["step"] = int(step)
    return {"state": state, "param_groups": groups}


def _masters(owner: Any, of: list[Source], *, is_loading: bool) -> list[list[Any]]:
    def entry(index: int) -> Any:
        shard = local_tensor(owner.parameters[index]).detach()
        # What is read must survive until load_state_dict: the model's rounded weights go into the shard in between.
        values = torch.empty_like(shard) if is_loading else shard
        return cut(of[index].template, of[index].held, values, prefix=f"{_STATE}.fp32_param")

    return [[entry(index) for index in group] for group in _indices(owner)]


def _load_groups(owner: Any, loaded: list[dict[str, Any]]) -> None:
    current = owner.optimizer.param_groups
    matched = groups_in_order(owner, current, [dict(group) for group in loaded])
    for group, saved in zip(current, matched):
        group.update({name: value for name, value in saved.items() if name not in ("params", "step")})


def _load_states(owner: Any, inner: dict[str, Any]) -> None:
    step = inner["state"].get("common_step")
    if step is None:
        step = next((group["step"] for group in inner["param_groups"] if "step" in group), None)
    for index, master in enumerate(owner.masters):
        values, loaded = owner.optimizer.state[master], inner["state"].get(index, {})
        for name, value in values.items():
            if name == "step":
                values[name] = _step_like(value, step)
            elif isinstance(value, torch.Tensor) and value.dim():
                write_into(value, loaded[name], f"{name} of parameter {index}")


def _step_like(value: Any, step: Any) -> Any:
    if step is None:
        return value
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, float(step))
    return type(value)(step)


def _initialise(owner: Any) -> None:
    """Create the states of a fresh optimizer, as its first step would."""
    for master in owner.masters:
        if not owner.optimizer.state.get(master):
            owner.optimizer.state[master] = _fresh_state(owner.optimizer, master)


def _fresh_state(optimizer: torch.optim.Optimizer, master: torch.nn.Parameter) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.SGD):
        momentum = any(group["momentum"] for group in optimizer.param_groups)
        return {"momentum_buffer": torch.zeros_like(master.detach())} if momentum else {}
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(master.detach()),
        "exp_avg_sq": torch.zeros_like(master.detach()),
    }


def _indices(owner: Any) -> list[list[int]]:
    """The indices of parameters in each group, numbered through all groups as torch does."""
    result, start = [], 0
    for group in owner.optimizer.param_groups:
        result.append(list(range(start, start + len(group["params"]))))
        start += len(group["params"])
    return result


def _keeps_masters(owner: Any) -> bool:
    return bool(owner.config.bf16 or owner.config.fp16)


def _is_per_element(value: Any, source: Source) -> bool:
    return isinstance(value, torch.Tensor) and tuple(local_tensor(value).shape) == source.held.local_shape


def _source(found: dict[int, Source], parameter: torch.nn.Parameter, index: int) -> Source:
    if id(parameter) not in found:
        raise UnsupportedError(
            f"parameter {index} of the optimizer, of shape {tuple(parameter.shape)}, is not in the model's state dict, "
            "so its optimizer state has no name in a checkpoint. Every trainable parameter must be saved by the model."
        )
    return found[id(parameter)]
