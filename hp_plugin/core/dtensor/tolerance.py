"""How far two computations of the same number may lie apart that differ in the order of summation only.

Rounding in a sum of K terms grows like the square root of K times the unit roundoff of the dtype, relative to the norm
of the terms. Errors here are relative to the norm of a tensor; the factor covers that every value has passed through
many sums. Some gradients are zero but for rounding (a bias of keys: softmax does not see it), so the norm of a tensor
counts as at least `FLOOR` of the norm of all of its kind.
"""

from __future__ import annotations

import math

import torch

FACTOR = 16.0
FLOOR = 1e-3


def tolerance(dtype: torch.dtype, reduction_length: int) -> float:
    """The largest relative error that rounding explains.

    Args:
        dtype: in which sums are formed, the lowest of those involved.
        reduction_length: number of terms of the longest sum: tokens for gradients of weights, width for activations.
    """
    return FACTOR * torch.finfo(dtype).eps * math.sqrt(max(reduction_length, 1))


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Norm of the difference over the norm of `expected`, which counts as at least `floor`; inf for nan and inf."""
    difference = torch.linalg.vector_norm(found.double() - expected.double()).item()
    scale = max(torch.linalg.vector_norm(expected.double()).item(), floor)
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else (math.inf if difference else 0.0)
