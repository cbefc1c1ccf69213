"""Tensor parallelism written by hand into the forward of the planned model's modules, as one would for speed alone.

The same collectives as the plan's, called where they belong, with nothing around them: no names, no checks, no steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.host_overhead.model import Norm
from bench.host_overhead.planned_model import MLP, Attention, Block, Blocks

# Newer torch renames both, and warning about the old names would take time.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Enter(torch.autograd.Function):
    """Into a region: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Out of a region: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _gather(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(1, tokens / ranks, dim) -> (1, tokens, dim)."""
    out = x.new_empty((ranks, *x.shape))
    _gather_into(out.view(-1), x.contiguous().view(-1), group=group)
    return out.movedim(0, 1).flatten(1, 2)


def _scatter(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(1, tokens, dim) of summands -> (1, tokens / ranks, dim)."""
    pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
    out = torch.empty_like(pieces[0])
    _reduce_scatter_into(out.view(-1), pieces.view(-1), group=group)
    return out


class _EnterFromPieces(torch.autograd.Function):
    """Into a region from a divided sequence: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _gather(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scatter(grad, ctx.group, ctx.ranks), None, None


class _LeaveToPieces(torch.autograd.Function):
    """Out of a region to a divided sequence: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _scatter(x, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.ranks), None, None


class _Attention(Attention):
    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(super().forward(_Enter.apply(x, self.group)), self.group)


class _MLP(MLP):
    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(super().forward(_Enter.apply(x, self.group)), self.group)


class _SequenceAttention(Attention):
    group: dist.ProcessGroup
    ranks: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = _EnterFromPieces.apply(x, self.group, self.ranks)
        return _LeaveToPieces.apply(super().forward(whole), self.group, self.ranks)


class _SequenceMLP(MLP):
    group: dist.ProcessGroup
    ranks: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = _EnterFromPieces.apply(x, self.group, self.ranks)
        return _LeaveToPieces.apply(super().forward(whole), self.group, self.ranks)


class _SequenceNorm(Norm):
    group: dist.ProcessGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _Enter.apply(self.weight, self.group)
        return torch.nn.functional.layer_norm(x, weight.shape, weight)


def divide_weights(model: Blocks, rank: int, ranks: int) -> Blocks:
    """Leaves each product the piece of `rank`: a model that computes what one rank does and communicates nothing."""
    for block in model.layers:
        assert isinstance(block, Block)
        for name, linear in [*block.attention.named_children(), *block.mlp.named_children()]:
            assert isinstance(linear, nn.Linear)
            dim = 1 if name in ("wo", "w2") else 0
            linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].contiguous())
    return model


def parallelize_by_hand(model: Blocks, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Blocks:
    """Divides the weights and gives the modules forwards that communicate over `group`."""
    ranks = dist.get_world_size(group)
    divide_weights(model, dist.get_rank(group), ranks)
    for block in model.layers:
        assert isinstance(block, Block)
        changed: list[tuple[nn.Module, type[nn.Module]]] = [(block.attention, _Attention), (block.mlp, _MLP)]
        if sequence_parallel:
            changed = [(block.attention, _SequenceAttention), (block.mlp, _SequenceMLP)]
            changed += [(block.attention_norm, _SequenceNorm), (block.mlp_norm, _SequenceNorm)]
        for module, cls in changed:
            module.__class__ = cls
            vars(module).update(group=group, ranks=ranks)
    return model
