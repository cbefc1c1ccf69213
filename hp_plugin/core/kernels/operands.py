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
    """Whether two plain tensors of one device have a byte in common."""
    begin, other = first.data_ptr(), second.data_ptr()
    return other < begin + first.nbytes and begin < other + second.nbytes


def are_same_array(first: Tensor, second: Tensor) -> bool:
    """Whether two plain tensors of one shape and device are the same elements of the same dtype."""
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype
