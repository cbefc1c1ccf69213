"""Kernels of the engine, chosen per operation, device type, dtype and size.

Every operation has a torch implementation that serves as its reference. On CPU the native library replaces some of them
where it is installed; for devices there is a table (`table.py`, `docs/kernels.md`), all of which is off until
``HP_KERNELS`` switches it on. :func:`chosen_kernels` says what is used and why. May be imported by every room of
``hp_plugin.core`` except ``devices``.
"""

from __future__ import annotations

from hp_plugin.core.kernels.accumulate import (
    accumulate_scaled_,
    accumulate_scaled_reference,
    scale_copy_,
    scale_copy_reference,
)
from hp_plugin.core.kernels.adam import AdamOptions, AdamShard, fused_adamw
from hp_plugin.core.kernels.availability import foreign_apex
from hp_plugin.core.kernels.choices import KernelChoice, chosen_kernels
from hp_plugin.core.kernels.layers import grouped_matmul, rms_norm, swiglu
from hp_plugin.core.kernels.native import NativeLibrary, NativeStatus, load_native, native_status
from hp_plugin.core.kernels.norm import l2_norm
from hp_plugin.core.kernels.sums import sum_in_order_, sum_in_order_reference
from hp_plugin.core.kernels.symmetric import symmetric_choice, symmetric_product
from hp_plugin.core.kernels.update import decay_update_
from hp_plugin.core.kernels.weight_gradient import accumulate_weight_gradient_

__all__ = [
    "AdamOptions",
    "AdamShard",
    "KernelChoice",
    "NativeLibrary",
    "NativeStatus",
    "accumulate_scaled_",
    "accumulate_scaled_reference",
    "accumulate_weight_gradient_",
    "chosen_kernels",
    "decay_update_",
    "foreign_apex",
    "fused_adamw",
    "grouped_matmul",
    "l2_norm",
    "load_native",
    "native_status",
    "rms_norm",
    "scale_copy_",
    "scale_copy_reference",
    "sum_in_order_",
    "sum_in_order_reference",
    "swiglu",
    "symmetric_choice",
    "symmetric_product",
]
