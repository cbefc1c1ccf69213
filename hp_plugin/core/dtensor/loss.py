"""Cross-entropy of logits that are divided over the vocabulary: no rank ever has a whole row of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hp_plugin.core.dtensor.applied import applied_plan
from hp_plugin.core.dtensor.collectives import AxisGroup
from hp_plugin.core.dtensor.plan import ShardingPlan
from hp_plugin.errors import ConfigurationError

LossFunction = Callable[..., torch.Tensor]


class _VocabularyParallel(torch.autograd.Function):
    """Per-token loss; two all-reduces of one and two numbers per token forward, none backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, line: AxisGroup, ignore: int) -> torch.Tensor:
        values = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        largest = values.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=line.group)
        shifted = values - largest.unsqueeze(-1)
        exponentials = shifted.exp()
        columns = logits.shape[-1]
        local = targets - line.rank * columns
        is_here = (local >= 0) & (local < columns)
        local = local.masked_fill(~is_here, 0)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
        sums = torch.stack([exponentials.sum(-1), target])
        dist.all_reduce(sums, group=line.group)
        ignored = targets == ignore
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), local, is_here, ignored)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, local, is_here, ignored = ctx.saved_tensors
        gradient = probabilities.clone()
        gradient.scatter_add_(-1, local.unsqueeze(-1), -is_here.to(gradient.dtype).unsqueeze(-1))
        gradient *= grad.masked_fill(ignored, 0).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    line: AxisGroup,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which each rank has a piece along the last dim.

    Every rank of `line` must call, with the same targets.

    Args:
        logits: (..., vocabulary / ranks), half precision is computed in fp32.
        targets: (...), ids of the whole vocabulary, or `ignore_index`.
        line: the ranks that divide the vocabulary.
        ignore_index: targets that do not count.
        reduction: as of cross_entropy.

    Returns:
        The loss, the same on all ranks: 0-dim, or shaped like `targets` for "none".
    """
    losses: torch.Tensor = _VocabularyParallel.apply(logits, targets, line, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (targets != ignore_index).sum()


def loss_axis(plan: ShardingPlan) -> str | None:
    """The axis that divides the logits which the model returns, if any."""
    root = plan.modules.get("")
    if root is None:
        return None
    for output in root.outputs.values():
        for axis, placement in output.leaves.items():
            if placement.is_shard and placement.dim == -1:
                return axis
    return None


def loss_function(model: nn.Module) -> LossFunction:
    """The cross-entropy that fits the logits which `model` returns: `loss(logits, targets, **options of torch's)`.

    `torch.nn.functional.cross_entropy` on (..., vocabulary) logits, or its counterpart for divided ones. Of a model in
    validation mode, the loss is followed too.
    """
    follower: Any = getattr(model, "_hp_follower", None)
    return _loss_function(model) if follower is None else follower.loss(_loss_function(model))


def loss_of_batch(model: nn.Module, batch: Mapping[str, Any] | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean loss of `model` on a batch: keyword arguments of a model that returns `.loss`, or input and targets.

    Raises:
        ConfigurationError: the model returned no loss.
    """
    if isinstance(batch, Mapping):
        loss: torch.Tensor | None = getattr(model(**batch), "loss", None)
        if loss is None:
            raise ConfigurationError("the model returned no loss; put labels into the batch, or pass loss_fn.")
        return loss
    inputs, targets = batch
    return loss_function(model)(model(inputs), targets)


def _loss_function(model: nn.Module) -> LossFunction:
    applied = applied_plan(model)
    axis = loss_axis(applied.plan) if applied is not None else None
    if applied is None or axis is None or applied.lines[axis].size == 1:
        return _whole
    line = applied.lines[axis]

    def loss(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        unknown = options.keys() - {"ignore_index", "reduction"}
        if unknown:
            raise ConfigurationError(
                f"cross-entropy of divided logits does not take {', '.join(sorted(unknown))}; plan without "
                "loss_parallel."
            )
        return vocabulary_parallel_cross_entropy(logits, targets, line, **options)

    return loss


def _whole(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def causal_lm_loss(line: AxisGroup) -> LossFunction:
    """The loss of HF-style causal models (labels are shifted by one), for divided logits."""

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction: Literal["sum", "mean"] = "mean" if num_items_in_batch is None else "sum"
        total = vocabulary_parallel_cross_entropy(
            logits, shift_labels, line, ignore_index=ignore_index, reduction=reduction
        )
        return total if num_items_in_batch is None else total / num_items_in_batch

    return loss
