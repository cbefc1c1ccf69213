"""The sum of several tensors in a fixed order, in one pass over memory: what a reduce-scatter computes on its rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_plugin.core.kernels.native import load_native
from hp_plugin.errors import ConfigurationError

# (dtype of the terms, dtype of the sum) -> native function.
_NATIVE = {
    (torch.float32, torch.float32): "hp_sum_f32",
    (torch.bfloat16, torch.bfloat16): "hp_sum_bf16",
    (torch.bfloat16, torch.float32): "hp_sum_bf16_f32",
}


def sum_in_order_(output: Tensor, terms: Sequence[Tensor], scale: float = 1.0) -> None:
    """Sets `output` to `scale * (terms[0] + terms[1] + ...)`, added in that order and rounded once.

    The arithmetic is float32 (float64 where a term is), so the bits depend on the order alone. Local.

    Args:
        output: Contiguous CPU or device tensor. It may be the first or the second term; it shares no memory with others.
        terms: One or more contiguous tensors of one dtype and of the shape of `output`.
        scale: Factor of the sum.

    Raises:
        ConfigurationError: The terms are none, or of different shapes or dtypes.
    """
    if not terms or any(term.shape != output.shape or term.dtype != terms[0].dtype for term in terms):
        raise ConfigurationError(
            f"sum_in_order_ was given terms {[(tuple(t.shape), t.dtype) for t in terms]} for an output of shape "
            f"{tuple(output.shape)}. It needs at least one term, all of one dtype and of the shape of the output."
        )
    function = _NATIVE.get((terms[0].dtype, output.dtype))
    library = load_native() if function is not None and output.device.type == "cpu" else None
    if function is None or library is None or not all(t.is_contiguous() for t in (output, *terms)):
        sum_in_order_reference(output, terms, scale)
        return
    sources = (ctypes.c_void_p * len(terms))(*(term.data_ptr() for term in terms))
    getattr(library.functions, function)(
        output.data_ptr(), sources, len(terms), scale, output.numel(), torch.get_num_threads()
    )
    torch.autograd.graph.increment_version(output)  # the write went past torch


def sum_in_order_reference(output: Tensor, terms: Sequence[Tensor], scale: float = 1.0) -> None:
    """The torch implementation of `sum_in_order_`."""
    with torch.no_grad():
        wide = torch.promote_types(terms[0].dtype, torch.float32)
        total = output if output.dtype == wide else torch.empty_like(output, dtype=wide)
        if len(terms) == 1:
            total.copy_(terms[0])
        else:
            torch.add(terms[0].to(wide), terms[1].to(wide), out=total)
        for term in terms[2:]:
            total.add_(term)
        if scale != 1.0:
            total.mul_(scale)
        if total is not output:
            output.copy_(total)
