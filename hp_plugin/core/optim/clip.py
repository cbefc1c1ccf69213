"""Clipping by the global norm of gradients that are spread over ranks.

The norm of a parameter's gradient is the sum over its shards, so local contributions are added up over the process
groups of the mesh axes that divide the parameter, and over no others: along a replicate axis every rank holds the same
values. Parameters that are divided over the same groups share one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from hp_plugin.core.kernels import l2_norm
from hp_plugin.core.layout import attached_layout, is_shard, local_tensor
from hp_plugin.core.transport import gradient_owner
from hp_plugin.errors import ConfigurationError

Groups = tuple[dist.ProcessGroup, ...]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; gives what torch's gives on one process.

    Args:
        parameters: parameters, plain or `DTensor`s on any meshes, or pieces that `apply_plan` made. A plain parameter
            counts as it is: the same values on every rank, or a rank's own. Parameters without gradients count as zero.
        max_norm: the largest norm to allow.
        norm_type: p > 0 of the p-norm, or `inf`.
        error_if_nonfinite: raise if the norm is nan or inf.

    Returns:
        The norm before clipping: a plain 0-dim tensor, fp32 (fp64 if a gradient is), equal on all ranks that share
        the parameters.

    Every rank of the parameters' meshes must call with the same parameters in the same order. Which collectives run
    depends on the parameters' placements only, so ranks may differ in which gradients exist.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        ConfigurationError: `norm_type` is not positive, or a gradient is placed differently from its parameter.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    total = total_grad_norm(params, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; to "
            "scale them by it anyway, pass error_if_nonfinite=False."
        )
    clip_grads_with_norm_(params, max_norm, total)
    return total


@torch.no_grad()
def total_grad_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The global norm of the gradients; see `clip_grad_norm_` for arguments, result and who must call."""
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type is {norm_type}, but must be a positive number or inf.")
    params = list(parameters)
    buckets = _by_shard_groups(params)
    device = local_tensor(params[0]).device if params else torch.device("cpu")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for groups, members in buckets:
        part = _local_part(_local_gradients(members), norm_type, dtype=dtype, device=device)
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        for group in groups:
            dist.all_reduce(part, op=operation, group=group)
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


@torch.no_grad()
def clip_grads_with_norm_(parameters: Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor) -> None:
    """Scales the local gradients by `min(1, max_norm / (total_norm + 1e-6))`. Local: no communication."""
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in _local_gradients(parameters):
        by_device.setdefault(grad.device, []).append(grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, scale.to(device))


def _local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The local, non-empty gradients that exist; refuses gradients that are placed unlike their parameter."""
    found = []
    for param in parameters:
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor) and (not isinstance(param, DTensor) or grad.placements != param.placements):
            placed = param.placements if isinstance(param, DTensor) else "a plain tensor"
            raise ConfigurationError(
                f"a parameter of shape {tuple(param.shape)} is placed as {placed}, but its gradient as "
                f"{grad.placements}; reduce or redistribute the gradient before clipping."
            )
        local = local_tensor(grad)
        if local.numel():
            found.append(local)
    return found


def _local_part(
    grads: list[torch.Tensor], norm_type: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What this rank adds to the p-th power of the norm (for inf: its largest magnitude), accumulated in `dtype`."""
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    if norm_type == 2.0:
        return l2_norm(grads, dtype, device) ** 2.0
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(grads, norm_type, dtype=dtype)])
    norm = torch.linalg.vector_norm(norms, norm_type)
    return norm if math.isinf(norm_type) else norm**norm_type


def _by_shard_groups(parameters: Sequence[torch.Tensor]) -> list[tuple[Groups, list[torch.Tensor]]]:
    """Parameters by the process groups over which they are divided, in order of first appearance."""
    buckets: dict[tuple[str, ...], tuple[Groups, list[torch.Tensor]]] = {}
    seen: dict[tuple[int, tuple[object, ...]], Groups] = {}  # asking a mesh for its groups is slow
    for param in parameters:
        groups: Groups = ()
        if isinstance(param, DTensor):
            # Where one replica alone has the gradient, the replicas' norms add up as those of shards do.
            is_owned = gradient_owner(param) is not None
            key = (id(param.device_mesh), (*param.placements, is_owned))
            if key not in seen:
                seen[key] = _shard_groups(param.device_mesh, param, over_replicas=is_owned)
            groups = seen[key]
        attached = attached_layout(param)
        if attached is not None:  # a sharding plan has divided it over axes of its own
            groups = (*groups, *attached.norm_groups)
        names = tuple(group.group_name for group in groups)
        buckets.setdefault(names, (groups, []))[1].append(param)
    return list(buckets.values())


def _shard_groups(mesh: DeviceMesh, param: DTensor, *, over_replicas: bool) -> Groups:
    if any(isinstance(placement, Partial) for placement in param.placements):
        raise ConfigurationError(f"a parameter is placed as {param.placements}; parameters cannot be partial sums.")
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(param.placements)
        if (over_replicas or is_shard(placement)) and mesh.size(axis) > 1
    )
