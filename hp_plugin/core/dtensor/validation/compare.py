"""Whether two tensors are equal but for rounding, and which element is the first that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_plugin.core.dtensor.tolerance import FLOOR, tolerance
from hp_plugin.core.dtensor.validation.arrangement import Grid, Placing

_ORDINARY = 1e15
"""Larger numbers stand for minus infinity in masks, and say nothing of the size of the others."""


@dataclass(frozen=True)
class Wrong:
    """The first element that is not as expected.

    Attributes:
        index: in the whole tensor.
        expected: value of one process.
        found: value on the rank.
        rank: row-major over the plan's axes.
    """

    index: tuple[int, ...]
    expected: float
    found: float
    rank: int


@dataclass(frozen=True)
class Scale:
    """How large a difference rounding explains, for the tensors of one operation.

    Attributes:
        size: of the largest number that went into a sum.
        length: terms of the longest sum.
        is_chain: the numbers have passed through many operations. One operation of half precision adds up in fp32 and
            rounds once, so that there the length does not count.
    """

    size: float
    length: int
    is_chain: bool = False

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest relative difference that rounding explains."""
        is_half = dtype in (torch.bfloat16, torch.float16)
        return tolerance(dtype, 1 if is_half and not self.is_chain else self.length)

    @classmethod
    def of(cls, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Scale:
        """From whole tensors before and after the operation."""
        lengths = [1]
        for tensor in [*inputs, *outputs]:
            if tensor.numel():
                lengths += [max(tensor.shape, default=1), tensor.numel() // (tensor.shape[-1] if tensor.ndim else 1)]
        most = max((t.numel() for t in inputs), default=1)
        least = min((t.numel() for t in outputs if t.numel()), default=1)
        return cls(FLOOR * max((largest(t) for t in inputs), default=0.0), max(*lengths, most // max(least, 1)))


def largest(tensor: torch.Tensor) -> float:
    """The largest ordinary magnitude of a floating-point tensor; 0 for others."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    size = tensor.detach().abs().double()
    return size.where(size < _ORDINARY, 0.0).max().item()


def is_equal(found: torch.Tensor, expected: torch.Tensor, scale: Scale, size: float) -> bool:
    """Whether `found` is `expected` but for rounding; `size` is the magnitude of the whole tensor."""
    if found.shape != expected.shape:
        return False
    return torch.equal(found, expected) or not bool(_apart(found, expected, scale, size).any())


def first_wrong(
    found: torch.Tensor, whole: torch.Tensor, grid: Grid, placing: Placing, scale: Scale, size: float
) -> Wrong | None:
    """The first element of this rank that is not what `placing` of `whole` gives it."""
    expected = grid.cut(whole, placing)
    if found.shape != expected.shape:
        return None
    apart = _apart(found, expected, scale, size)
    if not apart.any():
        return None
    places = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
    local = tuple(apart.nonzero()[0].tolist())
    index = torch.unravel_index(grid.cut(places, placing)[local], whole.shape)
    return Wrong(tuple(int(i) for i in index), float(expected[local].item()), float(found[local].item()), grid.index)


def _apart(found: torch.Tensor, expected: torch.Tensor, scale: Scale, size: float) -> torch.Tensor:
    """Where the two differ by more than rounding."""
    if not expected.is_floating_point() or found.dtype != expected.dtype:
        return found != expected
    found, expected = found.detach(), expected.detach()
    allowed = scale.tolerance(expected.dtype) * (expected.abs().double() + size + scale.size)
    near = (found.double() - expected.double()).abs() <= allowed
    return ~(near | (found == expected) | (found.isnan() & expected.isnan()))
