"""The steps of a boundary: each moves a plain tensor from one placement on a mesh axis to another, both ways.

A step is made once for a group and called in every forward. What its backward does follows from the placement of
gradients (see `AxisPlacement.gradient`) and is stated at each class.
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


def _all_to_all(x: torch.Tensor, line: AxisGroup, cut: int, join: int) -> torch.Tensor:
    pieces = _pieces(x, line, cut)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received.view(-1), pieces.view(-1), group=line.group)
    return received.movedim(0, join).flatten(join, join + 1)


def _narrow(x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
    length = x.shape[dim] // line.size
    return x.narrow(dim, line.rank * length, length).contiguous()


def _check_divides(x: torch.Tensor, line: AxisGroup, dim: int, where: str) -> None:
    if x.shape[dim] % line.size:
        raise ConfigurationError(
            f"{where}: dim {dim} of a tensor of shape {tuple(x.shape)} is divided over the {line.size} ranks of axis "
            f"{line.axis}, but {x.shape[dim]} is not a multiple of {line.size}; pad the sequence (or batch) to one."
        )


class _Copy(torch.autograd.Function):
    """replicate -> copy: the value as it is; gradients, partial sums, are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.line), None


class _Take(torch.autograd.Function):
    """replicate -> shard: the own piece; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim = line, dim
        return _narrow(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(grad, ctx.line, ctx.dim), None, None


class _TakeOfCopy(torch.autograd.Function):
    """copy -> shard: the own piece; the gradient has zeros elsewhere, being a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim, ctx.shape = line, dim, x.shape
        return _narrow(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        full = grad.new_zeros(ctx.shape)
        full.narrow(ctx.dim, ctx.line.rank * grad.shape[ctx.dim], grad.shape[ctx.dim]).copy_(grad)
        return full, None, None


class _First(torch.autograd.Function):
    """replicate -> partial: rank 0 contributes the value, others zeros; the gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
        return x.view_as(x) if line.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherForCopies(torch.autograd.Function):
    """shard -> copy: gather; gradients, partial sums, are added up and divided."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim = line, dim
        return _all_gather(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(grad, ctx.line, ctx.dim), None, None


class _GatherForReplicas(torch.autograd.Function):
    """shard -> replicate: gather; of the gradient, which all ranks have, the own piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim = line, dim
        return _all_gather(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _narrow(grad, ctx.line, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    """shard(cut) wanted, shard(join) given: all-to-all there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, join: int, cut: int) -> torch.Tensor:
        ctx.line, ctx.join, ctx.cut = line, join, cut
        return _all_to_all(x, line, cut, join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grad, ctx.line, ctx.join, ctx.cut), None, None, None


class _Sum(torch.autograd.Function):
    """partial -> replicate: add up; the gradient is the same on all ranks already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
        return _all_reduce(x, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumForCopies(torch.autograd.Function):
    """partial -> copy: add up, both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
        ctx.line = line
        return _all_reduce(x, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.line), None


class _SumAndTake(torch.autograd.Function):
    """partial -> shard: add up and divide; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup, dim: int) -> torch.Tensor:
        ctx.line, ctx.dim = line, dim
        return _reduce_scatter(x, line, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(grad, ctx.line, ctx.dim), None, None


class _Mean(torch.autograd.Function):
    """The value as it is; the gradient, a sum over ranks of which each has a mean over its own part, made a mean."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: AxisGroup) -> torch.Tensor:
        ctx.size = line.size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.size, None


@dataclass(frozen=True)
class Step:
    """One conversion, bound to its ranks.

    Attributes:
        name: what runs forward, e.g. "all_reduce"; "none" where only backward communicates.
        function: the autograd function.
        arguments: what it takes after the tensor.
        divided: dims that the axis must divide, negative ones from the end.
        where: module and tensor, for messages.
    """

    name: str
    function: Callable[..., torch.Tensor]
    line: AxisGroup
    dims: tuple[int, ...] = ()
    divided: tuple[int, ...] = ()
    where: str = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Converts `x`. Every rank of the axis must call."""
        if not self.dims:
            return self.function(x, self.line)
        dims = tuple(dim % x.ndim for dim in self.dims)
        if len(dims) == 2 and dims[0] == dims[1]:
            return x  # shard(1) and shard(-1) of a tensor with two dims
        for dim in self.divided:
            _check_divides(x, self.line, dim % x.ndim, self.where)
        return self.function(x, self.line, *dims)


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
    name, function = _STEPS[before.kind, after.kind]
    dims = tuple(p.dim for p in (before, after) if p.is_shard)
    divided = (after.dim,) if after.is_shard else ()
    return Step(name, function, line, dims, divided, where)


def mean_step(line: AxisGroup, where: str) -> Step | None:
    """What makes the gradient of a parameter a mean which an axis divides that divides the batch too."""
    return Step("none", _Mean.apply, line, where=where) if line.size > 1 else None


_STEPS: dict[tuple[str, str], tuple[str, Callable[..., torch.Tensor]]] = {
    ("replicate", "copy"): ("none", _Copy.apply),
    ("replicate", "shard"): ("take", _Take.apply),
    ("replicate", "partial"): ("first", _First.apply),
    ("copy", "shard"): ("take", _TakeOfCopy.apply),
    ("shard", "copy"): ("all_gather", _GatherForCopies.apply),
    ("shard", "replicate"): ("all_gather", _GatherForReplicas.apply),
    ("shard", "shard"): ("all_to_all", _Exchange.apply),
    ("partial", "replicate"): ("all_reduce", _Sum.apply),
    ("partial", "copy"): ("all_reduce", _SumForCopies.apply),
    ("partial", "shard"): ("reduce_scatter", _SumAndTake.apply),
}
