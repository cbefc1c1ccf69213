"""Norms and counts over shards: every element of the model counted once, without a DTensor operation.

A tensor of the model appears on several ranks: as different rows along the mesh axes that shard it, as equal copies
along those that replicate it, and as parts or copies along Megatron's tensor- and pipeline-parallel axes. So a sum over
the model is a local sum, summed over the sharding axes of the data-parallel mesh, then over the model-parallel group.
Copies are left out beforehand, by Megatron's own rules (:func:`counted_once`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_plugin.core.fsdp.experts import is_expert
from hp_plugin.core.layout import is_shard, local_tensor
from hp_plugin.megatron.releases.differences import is_tensor_parallel_duplicate


def sum_over_model(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    mesh: DeviceMesh | None,
    model_parallel_group: dist.ProcessGroup | None,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sum of one number per tensor, over all tensors of the model on all ranks.

    Every rank of the mesh and of the group must call, with or without parts. Costs one all-reduce of a few numbers
    per mesh axis that shards anything, and one over the model-parallel group.

    Args:
        parts: Pairs (tensor, number): `tensor` is the DTensor or plain tensor that tells the layout; `number` is a
            0-dim tensor computed from this rank's part of it.
        mesh: The data-parallel mesh of all DTensors among the parts; None if there is none at all.
        model_parallel_group: Ranks that hold other parts of the model; None if this rank holds all of it.
        device: Where the sum is made; that of the model, also on a rank that has no parameters.
        dtype: Of the sum.

    Returns:
        0-dim tensor of `dtype`, equal on all ranks that called.
    """
    names = _axis_names(mesh)
    # One running sum for each set of mesh axes that has to be summed over. Which sets exist follows from the layouts,
    # which all ranks of a mesh share; a set without members stays zero and costs nothing but its place in the message.
    sums: dict[tuple[str, ...], torch.Tensor] = {}
    for tensor, number in parts:
        axes = _sharding_axes(tensor, names)
        number = number.detach().to(dtype)
        sums[axes] = sums[axes] + number if axes in sums else number
    for axis in names:
        keys = sorted(axes for axes in sums if axis in axes)
        group = mesh.get_group(axis) if mesh is not None and keys else None
        if group is not None and group.size() > 1:
            message = torch.stack([sums[key] for key in keys])
            dist.all_reduce(message, group=group)
            sums.update(zip(keys, message.unbind()))
    total = torch.zeros((), dtype=dtype, device=device)
    for number in sums.values():
        total = total + number.to(device)
    if model_parallel_group is not None and model_parallel_group.size() > 1:
        dist.all_reduce(total, group=model_parallel_group)
    return total


def squared_norms(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The squared 2-norm of each rank-local part, as 0-dim fp32 tensors; 0 for an empty part."""
    local = [local_tensor(tensor).detach() for tensor in tensors]
    if not local:
        return []
    return [norm.float().square() for norm in torch._foreach_norm(local, 2.0, dtype=torch.float32)]


def zero_counts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """How many elements of each rank-local part are zero, as 0-dim int64 tensors."""
    local = [local_tensor(tensor).detach() for tensor in tensors]
    return [tensor.numel() - torch.count_nonzero(tensor) for tensor in local]


def counted_once(parameter: torch.Tensor, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
    """Whether this rank's copy of `parameter` is the one that counts, by the rules of stock Megatron.

    Parameters replicated over tensor-parallel ranks count on the first of them; `shared` ones (the second copy of a
    tied embedding) never.
    """
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import param_is_not_shared

    if not param_is_not_shared(parameter):
        return False
    if is_tensor_parallel_duplicate(parameter, tp_group=tp_group, expert_tp_group=expert_tp_group):
        return False
    once_over_remat = getattr(tensor_parallel, "param_is_not_gtp_duplicate", None)
    return once_over_remat is None or once_over_remat(parameter)


def replace_params_l2_norm(original: Callable[..., float]) -> Callable[..., float]:
    """Megatron's `calc_params_l2_norm`, for models that are wrapped in HyperFSDP; others go to the original."""

    @functools.wraps(original)
    def calc_params_l2_norm(model: Any, force_create_fp32_copy: bool = False) -> float:
        chunks = model if isinstance(model, list) else [model]
        if all(hasattr(chunk, "mesh") for chunk in chunks):
            return params_l2_norm(chunks)
        return original(model, force_create_fp32_copy)

    return calc_params_l2_norm


@torch.no_grad()
def params_l2_norm(chunks: Sequence[Any]) -> float:
    """The 2-norm of all parameters of the model: what `--log-params-norm` prints. Every rank must call.

    Stock Megatron would add up the shards of one rank only.

    Args:
        chunks: The model chunks of this rank, wrapped in HyperFSDP.
    """
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    expert_tp_group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    parameters = [p for chunk in chunks for p in chunk.parameters() if counted_once(p, tp_group, expert_tp_group)]
    meshes = [(False, chunks[0].mesh, parallel_state.get_model_parallel_group())]
    if chunks[0].expert_mesh is not None:
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        meshes.append((True, chunks[0].expert_mesh, group))
    total = torch.zeros((), device=chunks[0].device)
    for of_experts, mesh, group in meshes:
        part = [p for p in parameters if is_expert(p) == of_experts]
        total = total + sum_over_model(
            list(zip(part, squared_norms(part))), mesh=mesh, model_parallel_group=group, device=chunks[0].device
        )
    return total.sqrt().item()


def _axis_names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    if mesh is None:
        return ()
    if mesh.mesh_dim_names is None:
        raise ValueError("the data-parallel mesh has no axis names; build it with hp_plugin.core.topology.")
    return tuple(mesh.mesh_dim_names)


def _sharding_axes(tensor: torch.Tensor, names: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(name for name, placement in zip(names, tensor.placements) if is_shard(placement))
