"""The weight gradient of a linear layer, added to a gradient that is kept in higher precision."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.operands import is_plain
from hp_plugin.errors import ConfigurationError


def accumulate_weight_gradient_(main_grad: Tensor, inputs: Tensor, grad_output: Tensor) -> None:
    """``main_grad += grad_output^T @ inputs``, in place. Local: no rank communicates. Not recorded by autograd.

    Args:
        main_grad: (outputs, inputs), float32, or of the dtype of the operands.
        inputs: (tokens, inputs): what the layer was given.
        grad_output: (tokens, outputs), of the dtype of `inputs`.

    Raises:
        ConfigurationError: Shapes or dtypes are not as said.
    """
    fits = inputs.ndim == grad_output.ndim == 2 and inputs.dtype == grad_output.dtype
    fits = fits and inputs.shape[0] == grad_output.shape[0]
    fits = fits and main_grad.dtype in (torch.float32, inputs.dtype)
    if not fits or main_grad.shape != (grad_output.shape[1], inputs.shape[1]):
        raise ConfigurationError(
            f"accumulate_weight_gradient_ was given main_grad {tuple(main_grad.shape)} {main_grad.dtype}, inputs "
            f"{tuple(inputs.shape)} {inputs.dtype} and grad_output {tuple(grad_output.shape)} {grad_output.dtype}; it "
            "needs (outputs, inputs) in float32 or the dtype of the others, (tokens, inputs) and (tokens, outputs)"
        )
    chosen = table.kernels().choose("accumulate_weight_gradient_", main_grad.device.type, main_grad.dtype)
    # A part of apex that is built with a flag of its own.
    has_kernel = chosen == "apex" and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    if has_kernel and inputs.numel() and all(is_plain(each) for each in (main_grad, inputs, grad_output)):
        from hp_plugin.core.kernels import apex

        apex.accumulate_weight_gradient_(main_grad, inputs, grad_output)
    else:
        accumulate_weight_gradient_reference(main_grad, inputs, grad_output)


def accumulate_weight_gradient_reference(main_grad: Tensor, inputs: Tensor, grad_output: Tensor) -> None:
    """The torch implementation of `accumulate_weight_gradient_`: the product and the sum in float32 or wider."""
    with torch.no_grad():
        wide = torch.promote_types(main_grad.dtype, torch.float32)
        product = grad_output.to(wide).T @ inputs.to(wide)
        main_grad.copy_(main_grad.to(wide) + product) if main_grad.dtype != wide else main_grad.add_(product)
