"""What a native kernel must know of a tensor before it gets its address."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory is one run of elements that may be addressed: no subclass, no wrapper, no strides."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one device may have a byte in common; strided ones count with what lies between rows."""
    begin, other = first.data_ptr(), second.data_ptr()
    return other < begin + _span(first) and begin < other + _span(second)


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (steps + 1) * tensor.itemsize if tensor.numel() else 0


def are_same_array(first: Tensor, second: Tensor) -> bool:
    """Whether two plain tensors of one shape and device are the same elements of the same dtype."""
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype


def is_floating_matrix(tensor: Tensor) -> bool:
    """Whether a kernel that takes a row stride can address it: a matrix, its columns side by side, rows apart.

    Offsets must fit 32 bits, and the dtype be one that Triton's kernels compute with.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.ndim == 2
        and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and tensor.stride(1) == 1
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.stride(0) * tensor.shape[0] < 2**31 - 2**16
        and not tensor.is_neg()
    )
