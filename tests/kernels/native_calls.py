"""What the kernel tests share: a library that counts its calls, and operands at awkward addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hp_plugin.core.kernels import native


class NativeCalls:
    """Stands for the functions of the loaded library, passes calls on and counts them."""

    def __init__(self, library: native.NativeLibrary) -> None:
        self.names: list[str] = []
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        self.names.append(name)
        return getattr(self._library.functions, name)  # type: ignore[no-any-return]


def random(size: int, dtype: torch.dtype, seed: int, *, offset: int = 0) -> Tensor:
    """Normal numbers; the first lies `offset` elements behind an aligned address."""
    memory = torch.empty(size + offset, dtype=dtype)[offset:]
    return memory.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns: unlike values, they tell -0 from 0; any NaN stands for all of them."""
    whole = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return whole.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
