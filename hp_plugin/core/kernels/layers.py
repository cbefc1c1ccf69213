"""Fused operations of layers, for models that call them: torch's own everywhere, the vendor's where it has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.errors import ConfigurationError


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim. Differentiable.

    Args:
        x: (..., n), floating.
        weight: (n,), of the dtype of `x`.
        eps: Added to the mean.
    """
    if _npu_has("rms_norm", "npu_rms_norm", x):
        from hp_plugin.core.kernels import npu

        return npu.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) * b`` of the halves a, b of the last dim: (..., 2 n) to (..., n). Differentiable."""
    if x.shape[-1] % 2:
        raise ConfigurationError(f"swiglu halves the last dim, which has {x.shape[-1]} elements: it must be even")
    if _npu_has("swiglu", "npu_swiglu", x):
        from hp_plugin.core.kernels import npu

        return npu.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """A product per group of rows: rows of group i times ``weights[i]``. Differentiable by `x` and `weights`.

    Args:
        x: (rows, k): the rows of group 0, then those of group 1, ...
        weights: (groups, k, n).
        counts: (groups,), int64: rows of each group; their sum is `rows`.

    Returns:
        (rows, n).
    """
    if _npu_has("grouped_matmul", "npu_grouped_matmul", x):
        from hp_plugin.core.kernels import npu

        return npu.grouped_matmul(x, weights, counts)
    parts = x.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights)])


def _npu_has(operation: str, operator: str, x: Tensor) -> bool:
    if table.kernels().choose(operation, x.device.type, x.dtype) != "npu":
        return False
    from hp_plugin.core.kernels import npu

    return operator in npu.operators()
