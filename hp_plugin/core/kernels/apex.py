"""Adapter to the CUDA kernels of NVIDIA's apex: multi-tensor operations (`amp_C`) and fused weight gradients.

Written against apex's sources and tested with a stand-in for its extensions; it has not run with the real ones. Only
the table of kernels calls it, and only where `availability` found the real apex. What every function may be given is
for the operations beside this module to see to.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hp_plugin.errors import ConfigurationError

if TYPE_CHECKING:
    from hp_plugin.core.kernels.adam import AdamOptions, AdamShard

_ADAM_W = 1  # apex's ADAM_MODE_1: decoupled weight decay
_CHECK_BOTH = -1  # of axpby: look at both operands for infinities


def scale_(dst: Tensor, src: Tensor, alpha: float, *, accumulate: bool) -> None:
    """``dst = alpha * src``, or ``dst += alpha * src``; contiguous tensors of float32, float16 or bfloat16."""
    if dst.numel() == 0:
        return
    if accumulate:
        _apply("multi_tensor_axpby", [[src], [dst], [dst]], alpha, 1.0, _CHECK_BOTH)
    else:
        _apply("multi_tensor_scale", [[src], [dst]], alpha)
    torch.autograd.graph.increment_version(dst)


def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of contiguous tensors of one dtype: 0-dim, float32."""
    norm: Tensor = _apply("multi_tensor_l2norm", [list(tensors)], False)[0]
    return norm.reshape(())


def adamw_(shards: Sequence[AdamShard], options: AdamOptions, step: int) -> None:
    """Step number `step` of AdamW for all shards; the four tensors of a shard have one dtype, the same for all."""
    lists = [[shard[index] for shard in shards] for index in (1, 0, 2, 3)]  # gradients come first
    beta1, beta2 = options.betas
    bias_correction = 1
    arguments = (options.lr, beta1, beta2, options.eps, step, _ADAM_W, bias_correction, options.weight_decay)
    _apply("multi_tensor_adam", lists, *arguments)
    for written in (*lists[1], *lists[2], *lists[3]):
        torch.autograd.graph.increment_version(written)


def accumulate_weight_gradient_(main_grad: Tensor, inputs: Tensor, grad_output: Tensor) -> None:
    """``main_grad += grad_output^T @ inputs``; `main_grad` float32, or of the dtype of the others."""
    extension = _import("fused_weight_gradient_mlp_cuda")
    suffix = "fp32" if main_grad.dtype == torch.float32 else "fp16"
    getattr(extension, f"wgrad_gemm_accum_{suffix}")(inputs, grad_output, main_grad)
    torch.autograd.graph.increment_version(main_grad)


def _apply(operation: str, tensor_lists: list[list[Tensor]], *arguments: Any) -> Any:
    """``multi_tensor_applier(amp_C.operation, flag, tensor_lists, *arguments)``.

    The kernels raise the flag where they meet an infinity and compute on; nothing here reads it.
    """
    applier = _import("apex.multi_tensor_apply").multi_tensor_applier
    if not applier.available:
        raise ConfigurationError(
            "apex.multi_tensor_apply says that its extensions are not available, though a module amp_C was found: "
            "build apex with its CUDA extensions for this torch, or take apex out of HP_KERNELS"
        )
    flag = torch.zeros(1, dtype=torch.int32, device=tensor_lists[0][0].device)
    return applier(getattr(_import("amp_C"), operation), flag, tensor_lists, *arguments)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"HP_KERNELS switches apex on, but its module {name} does not import ({error}): build apex with that "
            "extension for this torch, or take apex out of HP_KERNELS"
        ) from error
