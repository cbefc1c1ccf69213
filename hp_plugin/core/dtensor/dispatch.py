"""Experts by all-to-all: every rank of an axis has its own tokens and some of the experts.

[Note: the same collectives on every rank] Which tokens go where is data. So that every rank enters every collective in
the same order all the same: all tensors of one direction travel in one autograd node, whose backward runs once all of
what came of them is done, and that node depends on the tokens that were sent, also where a rank got no token at all
and its experts computed nothing. No capacity: nothing is dropped and nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.core.dtensor.collectives import AxisGroup
from hp_plugin.errors import ConfigurationError, UnsupportedError


@dataclass(frozen=True, eq=False)
class Dispatch:
    """How tokens reach the experts that one module holds.

    Attributes:
        line: the ranks that divide the experts, in equal consecutive parts.
        experts: number of experts of the whole model.
        where: the module, for messages.
    """

    line: AxisGroup
    experts: int
    where: str

    def run(self, forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The experts' forward on tokens of all ranks. Every rank of the axis must call.

        The arguments are those of `forward`: tokens (T, hidden), the experts chosen for each (T, k), integers of the
        whole model, and their weights (T, k), in any order and by position or name. The original forward is called with
        the R pairs of a token and an expert that this rank got: (R, hidden), (R, 1) and (R, 1), numbered locally.

        Returns:
            (T, hidden): for each token of this rank the sum over its experts.
        """
        call = _Call.of(args, kwargs, self.where)
        tokens, chosen, weights = call.tokens, call.chosen, call.weights
        per_rank = self.experts // self.line.size
        target = (chosen // per_rank).flatten()
        order = torch.argsort(target, stable=True)
        rows = order // chosen.shape[-1]
        counts = torch.bincount(target, minlength=self.line.size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.line.group)
        sent, got = counts.tolist(), arriving.tolist()
        local = _exchange((chosen % per_rank).flatten()[order], self.line, sent, got)
        here, here_weights = _Exchange.apply(
            self.line, sent, got, 2, tokens[rows], weights.flatten()[order].unsqueeze(-1)
        )
        result = forward(module, *call.args(args, here, local, here_weights), **call.kwargs(here, local, here_weights))
        anchors = (here, here_weights, _anchor(module))
        (back,) = _Exchange.apply(self.line, got, sent, 1, result, *anchors)
        return back.new_zeros(tokens.shape[0], back.shape[-1]).index_add(0, rows, back)


def _exchange(x: torch.Tensor, line: AxisGroup, sent: list[int], got: list[int]) -> torch.Tensor:
    out = x.new_empty((sum(got), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=line.group)
    return out


class _Exchange(torch.autograd.Function):
    """Sends rows of the first `count` tensors; gradients come back. The other tensors only make the node exist."""

    @staticmethod
    def forward(
        ctx: Any, line: AxisGroup, sent: list[int], got: list[int], count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.line, ctx.sent, ctx.got, ctx.others = line, sent, got, len(tensors) - count
        return tuple(_exchange(x, line, sent, got) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        back = [_exchange(gradient, ctx.line, ctx.got, ctx.sent) for gradient in gradients]
        return (None, None, None, None, *back, *[None] * ctx.others)


def _anchor(module: nn.Module) -> torch.Tensor:
    """Requires a gradient where some weight of the experts does, on all ranks alike; a leaf of no one's."""
    wanted = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return torch.empty(0, requires_grad=wanted)


@dataclass(frozen=True, eq=False)
class _Call:
    """Where tokens, choices and weights stand among the arguments of a call: a position or a name each."""

    tokens: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    places: tuple[int | str, int | str, int | str]
    others: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> _Call:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [(place, value) for place, value in given if isinstance(value, torch.Tensor)]
        choices = [(place, value) for place, value in tensors if not value.is_floating_point()]
        floats = [(place, value) for place, value in tensors if value.is_floating_point()]
        if len(choices) != 1 or len(floats) != 2:
            raise UnsupportedError(
                f"module {where}: experts are dispatched by a forward of tokens (T, hidden), chosen experts (T, k) and "
                f"weights (T, k), but it was called with {len(floats)} floating and {len(choices)} integer tensors; "
                "give the module such a forward, or divide the experts inside, over tp."
            )
        (chosen_at, chosen), (tokens_at, tokens), (weights_at, weights) = choices[0], floats[0], floats[1]
        if tokens.ndim != 2 or chosen.ndim != 2 or weights.shape != chosen.shape or len(tokens) != len(chosen):
            raise UnsupportedError(
                f"module {where}: experts are dispatched by tokens (T, hidden), chosen experts (T, k) and weights "
                f"(T, k), but their shapes are {tuple(tokens.shape)}, {tuple(chosen.shape)} and {tuple(weights.shape)}."
            )
        places = (tokens_at, chosen_at, weights_at)
        return cls(tokens, chosen, weights, places, {k: v for k, v in kwargs.items() if k not in places})

    def args(
        self, args: tuple[Any, ...], tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> list[Any]:
        """The positional arguments with other tensors."""
        changed = list(args)
        for place, value in zip(self.places, (tokens, chosen.unsqueeze(-1), weights), strict=True):
            if isinstance(place, int):
                changed[place] = value
        return changed

    def kwargs(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        """The keyword arguments with other tensors."""
        pairs = zip(self.places, (tokens, chosen.unsqueeze(-1), weights), strict=True)
        return {**self.others, **{place: value for place, value in pairs if isinstance(place, str)}}


def expert_lists(name: str, module: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of experts that a module is or holds directly, by full name; none where its weights are stacked."""
    if isinstance(module, nn.ModuleList):
        return {name: module}
    return {f"{name}.{key}": child for key, child in module.named_children() if isinstance(child, nn.ModuleList)}


def count_experts(name: str, module: nn.Module) -> int:
    """How many experts a module holds: of its lists, or of its stacked weights.

    Raises:
        ConfigurationError: it holds neither, or lists of different lengths.
    """
    lists = expert_lists(name, module)
    counts = {len(each) for each in lists.values()} or {p.shape[0] for p in module.parameters(recurse=False)}
    if len(counts) != 1:
        raise ConfigurationError(
            f"module {name} holds no experts that could be dispatched to: it needs stacked weights (experts, ...) of "
            "one number of experts, or one nn.ModuleList of them."
        )
    return counts.pop()


def keep_own(module: nn.ModuleList, line: AxisGroup) -> int:
    """Leaves a list the experts of this rank, numbered from 0. Returns the number of the first in the whole list."""
    count = len(module) // line.size
    first = line.rank * count
    kept = list(module)[first : first + count]
    module._modules.clear()
    module.extend(kept)
    return first
