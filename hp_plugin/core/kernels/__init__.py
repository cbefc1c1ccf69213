"""Element-wise kernels of the engine, chosen per operation and device type.

Every entry has a torch implementation that serves as its reference. On CPU the native library replaces it where it is
installed; :func:`chosen_kernels` says what is used and why. May be imported by every room of ``hp_plugin.core`` except
``devices``.
"""

from __future__ import annotations

from hp_plugin.core.kernels.accumulate import (
    accumulate_scaled_,
    accumulate_scaled_reference,
    scale_copy_,
    scale_copy_reference,
)
from hp_plugin.core.kernels.choices import KernelChoice, chosen_kernels
from hp_plugin.core.kernels.native import NativeLibrary, NativeStatus, load_native, native_status
from hp_plugin.core.kernels.sums import sum_in_order_, sum_in_order_reference

__all__ = [
    "KernelChoice",
    "NativeLibrary",
    "NativeStatus",
    "accumulate_scaled_",
    "accumulate_scaled_reference",
    "chosen_kernels",
    "load_native",
    "native_status",
    "scale_copy_",
    "scale_copy_reference",
    "sum_in_order_",
    "sum_in_order_reference",
]
