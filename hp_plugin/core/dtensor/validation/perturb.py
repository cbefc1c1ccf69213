"""Constant parameters, whose placements could not be told apart by their values."""

from __future__ import annotations

import torch
from torch import nn


def perturb_constants(model: nn.Module, *, seed: int = 0) -> None:
    """Adds noise to parameters whose elements are all equal, such as zero biases and norms at their start.

    A bias of zeros is the same whether one rank adds it or all do.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(device=parameter.device, dtype=parameter.dtype))
