"""The sum of several tensors in a fixed order, in one pass over memory: what a reduce-scatter computes on its rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_plugin.core.kernels.native import load_native
from hp_plugin.core.kernels.operands import are_same_array, is_plain, share_memory
from hp_plugin.errors import ConfigurationError

# (dtype of the terms, dtype of the sum) -> native function.
_NATIVE = {
    (torch.float32, torch.float32): "hp_sum_f32",
    (torch.bfloat16, torch.bfloat16): "hp_sum_bf16",
    (torch.bfloat16, torch.float32): "hp_sum_bf16_f32",
}


def sum_in_order_(output: Tensor, terms: Sequence[Tensor], scale: float = 1.0) -> None:
    """Sets `output` to `scale * (terms[0] + terms[1] + ...)`, added in that order and rounded once.

    The arithmetic is float32 (float64 where a term is), so the bits depend on the order alone. Local: no rank
    communicates. Not recorded by autograd.

    Args:
        output: Contiguous floating-point tensor of any shape on any device. It may be the first or the second term
            itself; else it shares no memory with a term.
        terms: One or more contiguous tensors of one floating dtype, of the shape and on the device of `output`.
        scale: Factor of the sum.

    Raises:
        ConfigurationError: There is no term, or a shape, dtype, device or memory layout is not as said.
    """
    _check(output, terms)
    operands = (output, *terms)
    function = _NATIVE.get((terms[0].dtype, output.dtype)) if output.device.type == "cpu" else None
    library = load_native() if function is not None and all(map(is_plain, operands)) else None
    if function is None or library is None:
        sum_in_order_reference(output, terms, scale)
        return
    sources = (ctypes.c_void_p * len(terms))(*(term.data_ptr() for term in terms))
    getattr(library.functions, function)(
        output.data_ptr(), sources, len(terms), scale, output.numel(), torch.get_num_threads()
    )
    torch.autograd.graph.increment_version(output)  # the write went past torch


def sum_in_order_reference(output: Tensor, terms: Sequence[Tensor], scale: float = 1.0) -> None:
    """The torch implementation of `sum_in_order_`, which says what it may be given."""
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


def _check(output: Tensor, terms: Sequence[Tensor]) -> None:
    fits = bool(terms) and output.is_floating_point() and terms[0].is_floating_point()
    for term in terms:
        fits = fits and term.shape == output.shape and term.dtype == terms[0].dtype and term.device == output.device
    if not (fits and all(tensor.is_contiguous() for tensor in (output, *terms))):
        raise ConfigurationError(
            f"sum_in_order_ was given the terms {[_describe(term) for term in terms]} for the output "
            f"{_describe(output)}. It needs at least one term; all must be contiguous, have the output's shape and "
            "device and one floating-point dtype."
        )
    if output.device.type == "meta" or not all(map(is_plain, (output, *terms))):
        return  # without an address there is nothing to overlap
    for index, term in enumerate(terms):
        if share_memory(output, term) and not (index < 2 and are_same_array(output, term)):
            raise ConfigurationError(
                f"sum_in_order_ was given an output that shares memory with term {index}. It may be the first or the "
                "second term itself and must share nothing with the others: sum into memory of its own."
            )


def _describe(tensor: Tensor) -> str:
    layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {layout}"
