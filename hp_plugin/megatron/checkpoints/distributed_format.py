"""Optimizer state in the `torch_dist` formats of stock Megatron's distributed optimizer.

`fully_reshardable` has one tensor per parameter and state, `optimizer.state.{param,exp_avg,exp_avg_sq}.<parameter>`,
laid out like the weight. It is read for any layout, and written for jobs that have `--use-distributed-optimizer`.

`dp_reshardable` has flat buckets (see `bucket_space`). It is read only, by jobs with the model-parallel sizes of the
one that saved. A rank reads the runs of elements that its rows are, wherever they lie.

Both keep Adam's step in the parameter groups, and the fp32 weights as `param`, in fp32 jobs too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.bucket_space import Place, Saver, places
from hp_plugin.megatron.checkpoints.model_state import Source
from hp_plugin.megatron.checkpoints.slices import HeldRows, cut

SHARDING_TYPE = "distrib_optim_sharding_type"
"""In the metadata of a checkpoint: the distributed optimizer's format; absent where another optimizer saved."""

SAVER = "hyperfsdp_saver"
"""In the metadata while loading: the arguments of the job that saved."""

_STATES = "hyperfsdp_param_state"
# Not `param_state`: of that the part of a checkpoint that every rank reads may hold empty containers, by other names.
_RESHARDABLE, _BUCKETS = "fully_reshardable", "dp_reshardable"
_WEIGHT = "param"
_NAMES = {"momentum_buffer": "exp_avg"}
"""What a state is called that another optimizer than Adam reads: Muon starts from Adam's first moment."""


def format_of(metadata: dict[str, Any] | None) -> str | None:
    """The distributed optimizer's format that `metadata` names, None if it names none.

    Raises:
        UnsupportedError: A format that is neither read nor written.
    """
    name = (metadata or {}).get(SHARDING_TYPE)
    if name in (None, _RESHARDABLE, _BUCKETS):
        return name
    raise UnsupportedError(
        f"the optimizer state is in the distributed optimizer's format {name}; {_RESHARDABLE} and {_BUCKETS} can be "
        "read. Load it in the Megatron that wrote it and save it with --dist-ckpt-optim-fully-reshardable, or load "
        "weights alone with --no-load-optim."
    )


def tell_who_saved(original: Any) -> Any:
    """Megatron's `load_content_metadata`, with the arguments of the job that saved among the metadata."""

    def load_content_metadata(
        checkpoint_dir: Any = None, *, preloaded_state_dict: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        metadata: dict[str, Any] | None = original(checkpoint_dir, preloaded_state_dict=preloaded_state_dict)
        if metadata is not None and preloaded_state_dict is not None:
            metadata = {**metadata, SAVER: preloaded_state_dict.get("args")}
        return metadata

    return load_content_metadata


# ------------------------------------------------------------------------------------------------ saving


def describe_for_saving(owner: Any, of: list[Source], name: str, inner: dict[str, Any]) -> dict[str, Any]:
    """The state of `owner`, a `ShardOptimizer`, as `fully_reshardable`.

    Args:
        owner: The optimizer.
        of: Where each of its parameters is in the model's state dict.
        name: The format that is asked for.
        inner: What `optimizer_state` describes for jobs without the distributed optimizer: `state` and
            `param_groups`. In fp32 it is added, so that stock without the flag can read the checkpoint too.

    Raises:
        UnsupportedError: Another format.
    """
    if name != _RESHARDABLE:
        raise UnsupportedError(
            f"HyperFSDP has no buckets to save as {name}; ask for {SHARDING_TYPE} {_RESHARDABLE} in the metadata."
        )
    step = inner["state"].get("common_step")
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "step": _step(group, step)}
        for group in inner["param_groups"]
    ]
    states: dict[int, dict[str, Any]] = {}
    for index, source in enumerate(of):
        shard = local_tensor(owner.parameters[index]).detach()
        weight = cut(source.template, source.held, shard, prefix=f"optimizer.state.{_WEIGHT}")
        states[index] = {_WEIGHT: weight, **inner["state"].get(index, {})}
    result: dict[str, Any] = {
        "optimizer": {"param_groups": groups},
        "param_state": states,
        "param_state_sharding_type": _RESHARDABLE,
    }
    if owner.grad_scaler is not None:
        result["grad_scaler"] = owner.grad_scaler.state_dict()
    if not (owner.config.bf16 or owner.config.fp16):
        common = {name: value for name, value in inner["state"].items() if name == "common_step"}
        result.update(state=common, param_groups=inner["param_groups"])
    return result


def _step(group: dict[str, Any], common: Any) -> int:
    return int(group.get("step", 0) if common is None else common)


# ------------------------------------------------------------------------------------------------ loading


def describe_for_loading(owner: Any, of: list[Source], name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What `owner`, whose states exist, reads of a checkpoint in the format `name`.

    Raises:
        UnsupportedError: A checkpoint in buckets that do not fit this job.
    """
    if name == _RESHARDABLE:
        return {_STATES: {index: _whole_rows(owner, of, index) for index in range(len(of))}}
    saver = metadata.get(SAVER)
    where = places(owner.model_chunks, Saver.of(saver), of_experts=_of_experts(owner))
    prefix = f"optimizer.distributed.dp_group_idx_{dist.get_rank(owner.get_grad_stats_parallel_group())}"

    def common(part: str) -> ShardedObject:
        return ShardedObject(f"{prefix}.{part}", None, (1,), (0,), replica_id=(0, 0, _mesh_rank(owner)))

    result: dict[str, Any] = {
        "optimizer": common("optimizer"),
        _STATES: {
            index: _runs(owner, of[index].held, index, where[id(owner.parameters[index])], prefix)
            for index in range(len(of))
        },
    }
    if owner.grad_scaler is not None and getattr(saver, "fp16", False):
        result["grad_scaler"] = common("grad_scaler")
    return result


def is_distributed(state_dict: dict[str, Any]) -> bool:
    """Whether a loaded state was described by :func:`describe_for_loading`."""
    return _STATES in state_dict


def as_plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A loaded state as that of a job without sharding (`state`, `param_groups`), and its fp32 weights (`masters`)."""
    groups = [{**group, "params": []} for group in state_dict["optimizer"]["param_groups"]]
    steps = [group["step"] for group in groups if group.get("step") is not None]
    state: dict[Any, Any] = {"common_step": torch.tensor(float(max(steps)))} if steps else {}
    masters: dict[int, torch.Tensor] = {}
    for index, values in state_dict[_STATES].items():
        joined = {name: _joined(value) for name, value in values.items()}
        if _WEIGHT in joined:
            masters[index] = joined.pop(_WEIGHT)
        state[index] = joined
    return {"state": state, "param_groups": groups, "masters": masters}


def _joined(value: Any) -> torch.Tensor:
    if not isinstance(value, list):
        return value
    return torch.cat([run.reshape(-1) for run in value]) if value else torch.empty(0)


def _targets(owner: Any, held: HeldRows, index: int) -> dict[str, torch.Tensor]:
    """The tensors to read for one parameter, by name here: states, and in 16-bit jobs the fp32 weight."""
    values = owner.optimizer.state[owner.masters[index]]
    found = {
        name: local_tensor(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and tuple(local_tensor(value).shape) == held.local_shape
    }
    if owner.config.bf16 or owner.config.fp16:
        # Not the shard itself: the model's rounded weights are written there before masters are taken over.
        found[_WEIGHT] = torch.empty_like(local_tensor(owner.parameters[index]).detach())
    return found


def _whole_rows(owner: Any, of: list[Source], index: int) -> dict[str, Any]:
    template, held = of[index].template, of[index].held
    return {
        name: cut(template, held, value, prefix=f"optimizer.state.{_NAMES.get(name, name)}")
        for name, value in _targets(owner, held, index).items()
    }


def _runs(owner: Any, held: HeldRows, index: int, place: Place, prefix: str) -> dict[str, list[ShardedTensor]]:
    row = math.prod(held.shape[1:])
    result: dict[str, list[ShardedTensor]] = {}
    for name, value in _targets(owner, held, index).items():
        key = f"{prefix}.{place.key}.{_NAMES.get(name, name)}"
        flat, done = value.reshape(-1), 0
        result[name] = []
        for segment in held.segments:
            length = segment.length * row
            run = flat[done : done + length]
            start = place.start + segment.start * row
            result[name].append(_run(key, run, start, place.length, held.replica))
            done += length
    return result


def _run(key: str, data: torch.Tensor, start: int, length: int, replica: int) -> ShardedTensor:
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=(length,),
        global_offset=(start,),
        axis_fragmentations=None,
        replica_id=(0, 0, replica),
        prepend_axis_num=0,
        allow_shape_mismatch=False,
    )


def _mesh_rank(owner: Any) -> int:
    """Number of this rank on the optimizer's data-parallel mesh."""
    rank = 0
    for size, index in zip(owner.mesh.shape, owner.mesh.get_coordinate()):
        rank = rank * size + index
    return rank


def _of_experts(owner: Any) -> bool:
    return any(not getattr(parameter, "allreduce", True) for parameter in owner.parameters)
