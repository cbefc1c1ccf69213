"""Adapter to the fused operations of torch_npu.

Written against the operators that torch_npu 2.13 registers; their signatures and shapes are tested with the real
package on meta tensors, their values never. Which of them exist is asked of the package, not of its version.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hp_plugin.core.kernels.adam import AdamOptions, AdamShard

OPERATORS = ("npu_apply_adam_w", "npu_rms_norm", "npu_swiglu", "npu_grouped_matmul")
_SPLIT_ROWS, _SPLIT_DEPTH = 0, 2  # of npu_grouped_matmul: groups of rows of the left operand, or of what is summed over
_ONE_OUTPUT, _COUNTS = 3, 1  # the results in one tensor; the list of groups holds sizes and not their sums


@functools.lru_cache(maxsize=1)
def operators() -> frozenset[str]:
    """Those of `OPERATORS` that the installed torch_npu registers; imports it."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, RuntimeError):
        return frozenset()  # without Ascend's driver libraries it does not import
    return frozenset(name for name in OPERATORS if torch._C._jit_get_schemas_for_operator(f"npu::{name}"))


def adamw_(shard: AdamShard, options: AdamOptions, step: int) -> None:
    """Step number `step` of AdamW. The operator wants the powers of the betas from before the step."""
    (beta1, beta2), last = options.betas, step - 1
    out = [shard.param, shard.exp_avg, shard.exp_avg_sq]
    powers_and_options = (beta1**last, beta2**last, options.lr, options.weight_decay, beta1, beta2, options.eps)
    torch.ops.npu.npu_apply_adam_w.out(*powers_and_options, shard.grad, None, False, False, out=out)
    for written in out:
        torch.autograd.graph.increment_version(written)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dim; torch_npu has its derivative."""
    result: Tensor = torch.ops.npu.npu_rms_norm(x, weight, eps)[0]
    return result


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dim, times the second; torch_npu has its derivative."""
    result: Tensor = torch.ops.npu.npu_swiglu(x, -1)
    return result


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`layers.grouped_matmul`, with a derivative of two more calls."""
    return GroupedMatmul.apply(x, weights, counts)


class GroupedMatmul(torch.autograd.Function):
    """A product per group of rows, and its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """One call for all groups."""
        ctx.save_for_backward(x, weights, counts)
        return _grouped(x, weights, counts, _SPLIT_ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """One call for each gradient that is wanted."""
        x, weights, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _grouped(grad, weights.mT, counts, _SPLIT_ROWS) if ctx.needs_input_grad[0] else None
        grad_weights = _grouped(x.mT, grad, counts, _SPLIT_DEPTH) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weights, None


def _grouped(left: Tensor, right: Tensor, counts: Tensor, split: int) -> Tensor:
    results = torch.ops.npu.npu_grouped_matmul(
        [left], [right], group_list=counts, split_item=_ONE_OUTPUT, group_type=split, group_list_type=_COUNTS
    )
    result: Tensor = results[0]
    return result
