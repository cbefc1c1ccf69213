"""What Newton-Schulz runs by device, dtype and aspect ratio: what `hp-plugin doctor` prints of `KERNEL_TABLE`."""

from __future__ import annotations

import torch

from hp_plugin.core.kernels import symmetric_choice
from hp_plugin.core.kernels.table import DEVICE_TYPES
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.newton_schulz import NewtonSchulz

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 64), (4096, 4096), (4096, 16384))
"""Rows and columns that are asked about: small, square, and wide."""
BATCH = 8
"""Matrices of one shape that are asked about."""


def newton_schulz_choices() -> list[dict[str, str]]:
    """Of each device type, dtype and shape: the kernel of "auto", and what computes its symmetric products."""
    steps = resolve_coefficients("classic", None)
    found = []
    for device_type in ("cpu", *DEVICE_TYPES):
        for dtype in DTYPES:
            iteration = NewtonSchulz(steps, dtype=dtype)
            for rows, cols in SHAPES:
                found.append(
                    {
                        "device_type": device_type,
                        "dtype": str(dtype).removeprefix("torch."),
                        "matrices": f"{BATCH} of {rows} x {cols}",
                        "kernel": iteration.kernel_for(rows, cols, BATCH, device_type),
                        "symmetric_products": symmetric_choice(device_type, dtype, rows),
                    }
                )
    return found
