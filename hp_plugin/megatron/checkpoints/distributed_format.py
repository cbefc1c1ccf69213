"""Optimizer state in the `torch_dist` formats of stock Megatron's distributed optimizer.

`fully_reshardable` has one tensor per parameter and state, `optimizer.state.{param,exp_avg,exp_avg_sq}.<parameter>`,
laid out like the weight. It is read for any layout, and written for jobs that have `--use-distributed-optimizer`.

`dp_reshardable` has flat buckets (see `bucket_space`). It is read only, by jobs with the model-parallel sizes of the
one that saved. A rank reads the runs of elements that its rows are, wherever they lie.

`fully_sharded_model_space` (see `model_space`) and `dp_zero_gather_scatter` (see `gathered_space`) are those of
Megatron 0.12. The first is read in every layout by every release, and written under 0.12.

All keep Adam's step in the parameter groups, and the fp32 weights in fp32 jobs too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints import gathered_space, model_space
from hp_plugin.megatron.checkpoints.bucket_space import Place, Saver, is_of_experts, places
from hp_plugin.megatron.checkpoints.gathered_space import GATHERED
from hp_plugin.megatron.checkpoints.model_space import MASTER, MODEL_SPACE
from hp_plugin.megatron.checkpoints.model_state import Source
from hp_plugin.megatron.checkpoints.opened import OPENED, SAVER, SHARDING_TYPE
from hp_plugin.megatron.checkpoints.slices import HeldRows, cut
from hp_plugin.megatron.releases.differences import takes_irregular_grids

__all__ = [
    "SAVER",
    "SHARDING_TYPE",
    "as_plain",
    "describe_for_loading",
    "describe_for_saving",
    "format_of",
    "is_distributed",
]

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
    known = (_RESHARDABLE, _BUCKETS, MODEL_SPACE, GATHERED)
    if name is None or name in known:
        return name
    raise UnsupportedError(
        f"the optimizer state is in the distributed optimizer's format {name}; {', '.join(known)} can be read. Load it "
        "in the Megatron that wrote it and save it in one of them (--dist-ckpt-optim-fully-reshardable, or "
        "--ckpt-fully-parallel-save in 0.12), or load weights alone with --no-load-optim."
    )


# ------------------------------------------------------------------------------------------------ saving


def describe_for_saving(owner: Any, of: list[Source], name: str, inner: dict[str, Any]) -> dict[str, Any]:
    """The state of `owner`, a `ShardOptimizer`, as `fully_reshardable`, or in Megatron 0.12 as its model space.

    Args:
        owner: The optimizer.
        of: Where each of its parameters is in the model's state dict.
        name: The format that is asked for.
        inner: What `optimizer_state` describes for jobs without the distributed optimizer: `state` and
            `param_groups`. In fp32 it is added to `fully_reshardable`, so that stock without the flag can read the
            checkpoint too.

    Raises:
        UnsupportedError: Another format.
    """
    possible = _RESHARDABLE if takes_irregular_grids() else MODEL_SPACE
    if name != possible:
        raise UnsupportedError(
            f"HyperFSDP cannot save as {name} in this release of Megatron; ask for {SHARDING_TYPE} {possible}."
        )
    step = inner["state"].get("common_step")
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "step": _step(group, step)}
        for group in inner["param_groups"]
    ]
    states: dict[int, dict[str, Any]] = {}
    for index, source in enumerate(of):
        shard = local_tensor(owner.parameters[index]).detach()
        if name == MODEL_SPACE:
            states[index] = _ranges(source, {MASTER: shard, **_states(owner, source.held, index)})
        else:
            weight = cut(source.template, source.held, shard, prefix=f"optimizer.state.{_WEIGHT}")
            states[index] = {_WEIGHT: weight, **inner["state"].get(index, {})}
    result: dict[str, Any] = {
        "optimizer": {"param_groups": groups},
        "param_state": states,
        "param_state_sharding_type": name,
    }
    if owner.grad_scaler is not None:
        result["grad_scaler"] = owner.grad_scaler.state_dict()
    if name == _RESHARDABLE and not (owner.config.bf16 or owner.config.fp16):
        common = {name: value for name, value in inner["state"].items() if name == "common_step"}
        result.update(state=common, param_groups=inner["param_groups"])
    return result


def _step(group: dict[str, Any], common: Any) -> int:
    return int(group.get("step", 0) if common is None else common)


# ------------------------------------------------------------------------------------------------ loading


def describe_for_loading(owner: Any, of: list[Source], name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What `owner`, whose states exist, reads of a checkpoint in the format `name`.

    Raises:
        UnsupportedError: A checkpoint in buckets that do not fit this job, or that nobody has opened.
    """
    if name == _RESHARDABLE:
        return {_STATES: {index: _whole_rows(owner, of, index) for index in range(len(of))}}
    if name == MODEL_SPACE:
        return {_STATES: {index: _from_model_space(owner, of, index, metadata) for index in range(len(of))}}
    saver = metadata.get(SAVER)
    prefix = f"optimizer.distributed.dp_group_idx_{dist.get_rank(owner.get_grad_stats_parallel_group())}"

    def common(part: str) -> ShardedObject:
        return ShardedObject(f"{prefix}.{part}", None, (1,), (0,), replica_id=(0, 0, _mesh_rank(owner)))

    result: dict[str, Any] = {"optimizer": common("optimizer")}
    if name == GATHERED:
        result.update(gathered_space.describe(owner, saver, prefix))
    else:
        where = places(owner.model_chunks, Saver.of(saver, _BUCKETS), of_experts=is_of_experts(owner))
        result[_STATES] = {
            index: _runs(owner, of[index].held, index, where[id(owner.parameters[index])], prefix)
            for index in range(len(of))
        }
    if owner.grad_scaler is not None and getattr(saver, "fp16", False):
        result["grad_scaler"] = common("grad_scaler")
    return result


def is_distributed(state_dict: dict[str, Any]) -> bool:
    """Whether a loaded state was described by :func:`describe_for_loading`."""
    return _STATES in state_dict or gathered_space.PLACES in state_dict


def as_plain(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A loaded state as that of a job without sharding (`state`, `param_groups`), and its fp32 weights (`masters`).

    Every rank of the data-parallel mesh must call: one of the formats is read by one rank and broadcast.
    """
    groups = [{**group, "params": []} for group in state_dict["optimizer"]["param_groups"]]
    steps = [group["step"] for group in groups if group.get("step") is not None]
    state: dict[Any, Any] = {"common_step": torch.tensor(float(max(steps)))} if steps else {}
    masters: dict[int, torch.Tensor] = {}
    loaded = state_dict[_STATES] if _STATES in state_dict else _scattered(owner, state_dict)
    for index, values in loaded.items():
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
    found = _states(owner, held, index)
    if owner.config.bf16 or owner.config.fp16:
        # Not the shard itself: the model's rounded weights are written there before masters are taken over.
        found[_WEIGHT] = torch.empty_like(local_tensor(owner.parameters[index]).detach())
    return found


def _states(owner: Any, held: HeldRows, index: int) -> dict[str, torch.Tensor]:
    """The states of one parameter that have an element for each of its own."""
    values = owner.optimizer.state.get(owner.masters[index]) or {}
    return {
        name: local_tensor(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and tuple(local_tensor(value).shape) == held.local_shape
    }


def _ranges(source: Source, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: model_space.ranges(
            source.template, source.held, value.detach(), key=f"optimizer.state.{name}.{source.template.key}"
        )
        for name, value in values.items()
    }


def _from_model_space(owner: Any, of: list[Source], index: int, metadata: dict[str, Any]) -> dict[str, Any]:
    opened = metadata.get(OPENED)
    if opened is None:
        raise UnsupportedError(
            f"the optimizer state is in the distributed optimizer's format {MODEL_SPACE}, which is read by what the "
            "checkpoint says of its tensors; read its common part first, by Megatron's load_common_state_dict."
        )
    chain = "" if metadata.get("chained_optim_avoid_prefix") else owner.chain_prefix
    template, held = of[index].template, of[index].held
    return {
        name: model_space.entry(
            opened,
            template,
            held,
            value,
            name=MASTER if name == _WEIGHT else _NAMES.get(name, name),
            chain=chain,
        )
        for name, value in _targets(owner, held, index).items()
    }


def _scattered(owner: Any, state_dict: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    held = [HeldRows.of(parameter) for parameter in owner.parameters]
    targets = [_targets(owner, rows, index) for index, rows in enumerate(held)]
    renamed = [{_NAMES.get(name, name): value for name, value in each.items()} for each in targets]
    gathered_space.scatter(owner, state_dict, held, renamed)
    return dict(enumerate(targets))


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
