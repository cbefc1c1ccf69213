"""The steps of a boundary: each moves a plain tensor from one placement on a mesh axis to another, both ways.

A step is made once for a group and called in every forward. What its backward does follows from the placement of
gradients (see `AxisPlacement.gradient`); `_STEPS` has both ways of every conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.dtensor.placement import AxisPlacement
from hp_plugin.errors import ConfigurationError, UnsupportedError

# Newer torch renames both, and warns about the old names in every process.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Conversion = Callable[..., torch.Tensor]
"""Takes a tensor, the ranks, and the dims of a step."""


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks of this rank's line along one mesh axis.

    Attributes:
        axis: name of the axis.
        group: its process group.
        size: number of ranks.
        rank: this rank's coordinate.
    """

    axis: str
    group: dist.ProcessGroup
    size: int
    rank: int

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisGroup:
        return self  # a copy of a model talks to the same ranks


def _all_reduce(x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
    # The tensor may be someone else's: a residual stream, or a gradient that autograd passes to several consumers.
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=line.group)
    return out


def _all_gather(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    gathered = x.new_empty((line.size, *x.shape))
    _gather_into(gathered.view(-1), x.contiguous().view(-1), group=line.group)
    if dim == 0:
        return gathered.flatten(0, 1)
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def _pieces(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    """Contiguous, shape (ranks, *shape of one rank's piece along `dim`)."""
    return x.unflatten(dim, (line.size, x.shape[dim] // line.size)).movedim(dim, 0).contiguous()


def _reduce_scatter(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    pieces = _pieces(x, line, dim)
    out = torch.empty_like(pieces[0])
    _reduce_scatter_into(out.view(-1), pieces.view(-1), group=line.group)
    return out


def _all_to_all(x: torch.Tensor, line: AxisGroup, join: int, cut: int) -> torch.Tensor:
    """From pieces along `join` to pieces along `cut`."""
    pieces = _pieces(x, line, cut)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received.view(-1), pieces.view(-1), group=line.group)
    return received.movedim(0, join).flatten(join, join + 1)


def _all_to_all_back(x: torch.Tensor, line: AxisGroup, join: int, cut: int) -> torch.Tensor:
    return _all_to_all(x, line, cut, join)


def _narrow(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    length = x.shape[dim] // line.size
    return x.narrow(dim, line.rank * length, length).contiguous()


def _widen(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    """The own piece in its place, zeros elsewhere: a summand of the whole."""
    length = x.shape[dim]
    whole = x.new_zeros((*x.shape[:dim], length * line.size, *x.shape[dim + 1 :]))
    whole.narrow(dim, line.rank * length, length).copy_(x)
    return whole


def _same(x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
    return x.view_as(x)


def _as_it_is(grad: torch.Tensor, line: AxisGroup) -> torch.Tensor:
    return grad  # a gradient needs no view of its own, unlike a result


def _on_first(x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
    return x.view_as(x) if line.rank == 0 else torch.zeros_like(x)


def _check_divides(x: torch.Tensor, line: AxisGroup, dim: int, where: str) -> None:
    if x.shape[dim] % line.size:
        raise ConfigurationError(
            f"{where}: dim {dim} of a tensor of shape {tuple(x.shape)} is divided over the {line.size} ranks of axis "
            f"{line.axis}, but {x.shape[dim]} is not a multiple of {line.size}; pad the sequence (or batch) to one."
        )


class _Conversion(torch.autograd.Function):
    """One way forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: Step, *dims: int) -> torch.Tensor:
        ctx.step, ctx.dims = step, dims
        return step.there(x, step.line, *dims)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.step.back(grad, ctx.step.line, *ctx.dims), None, *[None for _ in ctx.dims]


def _mean(x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
    """Of a sum over ranks, each of which has a mean over its own part."""
    return x / line.size


@dataclass(frozen=True)
class Step:
    """One conversion, bound to its ranks.

    Attributes:
        name: what runs forward, e.g. "all_reduce"; "none" where only backward does something.
        there: forward.
        back: backward, on the gradient.
        line: the ranks.
        dims: of the tensor, for both.
        divided: dims that the axis must divide, negative ones from the end.
        where: module and tensor, for messages.
    """

    name: str
    there: Conversion
    back: Conversion
    line: AxisGroup
    dims: tuple[int, ...] = ()
    divided: tuple[int, ...] = ()
    where: str = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Converts `x`. Every rank of the axis must call."""
        if not self.dims:
            return _Conversion.apply(x, self)
        dims = tuple(dim % x.ndim for dim in self.dims)
        if len(dims) == 2 and dims[0] == dims[1]:
            return x  # shard(1) and shard(-1) of a tensor with two dims
        for dim in self.divided:
            _check_divides(x, self.line, dim % x.ndim, self.where)
        return _Conversion.apply(x, self, *dims)


def is_possible(before: AxisPlacement, after: AxisPlacement) -> bool:
    """Whether a boundary can convert `before` to `after`."""
    return before == after or ((before.kind, after.kind) in _STEPS and before.blocks == after.blocks == 1)


def make_step(before: AxisPlacement, after: AxisPlacement, line: AxisGroup, where: str) -> Step | None:
    """The step from `before` to `after`; None where nothing is to be done, or the axis has one rank.

    Raises:
        UnsupportedError: no boundary converts so.
    """
    if not is_possible(before, after):
        raise UnsupportedError(
            f"{where}: a boundary cannot convert {before} to {after} on axis {line.axis}; docs/sharding-plan.md lists "
            "the conversions."
        )
    if before == after or line.size == 1:
        return None
    name, there, back = _STEPS[before.kind, after.kind]
    dims = tuple(p.dim for p in (before, after) if p.is_shard)
    divided = (after.dim,) if after.is_shard else ()
    return Step(name, there, back, line, dims, divided, where)


def mean_step(line: AxisGroup, where: str) -> Step | None:
    """What makes the gradient of a parameter a mean which an axis divides that divides the batch too."""
    return Step("none", _same, _mean, line, where=where) if line.size > 1 else None


_STEPS: dict[tuple[str, str], tuple[str, Conversion, Conversion]] = {
    ("replicate", "copy"): ("none", _same, _all_reduce),
    ("replicate", "shard"): ("take", _narrow, _all_gather),
    ("replicate", "partial"): ("first", _on_first, _as_it_is),
    ("copy", "shard"): ("take", _narrow, _widen),
    ("shard", "copy"): ("all_gather", _all_gather, _reduce_scatter),
    ("shard", "replicate"): ("all_gather", _all_gather, _narrow),
    ("shard", "shard"): ("all_to_all", _all_to_all, _all_to_all_back),
    ("partial", "replicate"): ("all_reduce", _all_reduce, _as_it_is),
    ("partial", "copy"): ("all_reduce", _all_reduce, _all_reduce),
    ("partial", "shard"): ("reduce_scatter", _reduce_scatter, _all_gather),
}
"""Placements before and after -> what runs forward, its code, and that of backward: the row of the duals."""
