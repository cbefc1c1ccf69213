"""Random numbers: both runs must use the same ones, and ranks that hold one value must draw alike.

A dropout is replayed as a product with the mask that one process drew, of which each rank takes its piece; other draws
are replaced by pieces. What the ranks draw themselves is looked at first: on an axis that does not divide the tensor,
it must be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DROPOUTS = {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
"""Operations that multiply their input with random numbers."""

DRAWS = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal",
    "normal_", "uniform_", "exponential_", "random_", "randperm", "multinomial", "poisson", "cauchy_", "geometric_",
    "log_normal_",
}  # fmt: skip
"""Operations whose outputs are random numbers."""

WHOLE_DRAWS = {"multinomial", "randperm"}
"""Draws of which no piece can be taken."""


def mask_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Of a dropout that is active, what it would multiply its input with now; None for all else. Draws."""
    if name not in DROPOUTS:
        return None
    x = args[0] if args else kwargs["input"]
    options = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | {
        k: v for k, v in kwargs.items() if k != "input"
    }
    probability = options.get("p", 0.5)
    if not options.get("training", True) or probability == 0:
        return None
    function: Callable[..., torch.Tensor] = getattr(torch.nn.functional, name.removesuffix("_"), torch.feature_dropout)
    return function(torch.ones_like(x, requires_grad=False).detach(), probability, True)


def replayed_as(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mask: torch.Tensor
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The product that stands for a dropout with this mask."""
    x = args[0] if args else kwargs["input"]
    in_place = name.endswith("_") or kwargs.get("inplace", args[3] if len(args) > 3 else False)
    return (torch.Tensor.mul_ if in_place else torch.mul), (x, mask), {}
