"""The L2 norm of many tensors together: what a rank contributes to gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.operands import is_plain


def l2_norm(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The square root of the sum of squares of all elements. Local: no rank communicates.

    Args:
        tensors: Non-empty floating-point tensors, of any shapes, dtypes and devices; at least one.
        dtype: In which squares are added up: float32 or float64.
        device: Where the result is wanted.

    Returns:
        0-dim tensor of `dtype` on `device`.
    """
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(_implementation(tensor, dtype), []).append(tensor)
    norms: list[Tensor] = []
    if torch_served := parts.pop("torch", []):
        norms.append(l2_norm_reference(torch_served, dtype, device))
    for implementation, members in parts.items():
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in members:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        norms.extend(_fused(implementation, each).to(device) for each in alike.values())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), 2.0)


def l2_norm_reference(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The torch implementation of `l2_norm`, for every tensor."""
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(list(tensors), 2.0, dtype=dtype)])
    return torch.linalg.vector_norm(norms, 2.0)


def _implementation(tensor: Tensor, dtype: torch.dtype) -> str:
    if dtype != torch.float32 or not is_plain(tensor):
        return "torch"
    return table.kernels().choose("l2_norm", tensor.device.type, tensor.dtype)


def _fused(implementation: str, tensors: list[Tensor]) -> Tensor:
    if implementation == "apex":
        from hp_plugin.core.kernels import apex

        return apex.l2_norm(tensors)
    from hp_plugin.core.kernels.triton_kernels import launch

    return launch.sums_of_squares(tensors).sqrt()
