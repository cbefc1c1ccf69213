"""Scale of an orthogonalized update by the shape of its matrix.

An orthogonalized m x n matrix has Frobenius norm sqrt(min(m, n)), whatever the gradient was. How large an update
should be instead depends on what is to stay constant over shapes, and libraries differ; worse, one word means different
formulas in them. The formulas therefore have names of their own here, and what a library calls them is an alias with
the library in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hp_plugin.errors import ConfigurationError

FORMULAS: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        # Keller Jordan: the spectral norm of the update, corrected for tall matrices alone.
        "clamped_aspect": lambda m, n: math.sqrt(max(1.0, m / n)),
        # Kimi (arXiv 2502.16982) without its constant: every entry has a root mean square of 1.
        "max_dim": lambda m, n: math.sqrt(max(m, n)),
        # Bernstein, Scion (arXiv 2502.07529): the RMS-to-RMS operator norm is 1.
        "aspect": lambda m, n: math.sqrt(m / n),
        # Kimi: an RMS of 0.2 per entry, which is about that of AdamW's updates, so that its learning rates carry over.
        "adamw_rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
        "none": lambda m, n: 1.0,
    }
)
"""Formula of each name, of (m, n): outputs and inputs."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "keller:original": "clamped_aspect",
        "torch:original": "clamped_aspect",
        "torch:match_rms_adamw": "adamw_rms",
        "megatron:shape_scaling": "clamped_aspect",
        "megatron:spectral": "max_dim",
        "megatron:unit_rms_norm": "aspect",
        "dion:spectral_norm": "aspect",
        "dion:rms_norm": "adamw_rms",
        "dion:none": "none",
        "deepspeed:default": "clamped_aspect",
        "moonlight": "adamw_rms",
        "moonlight:match_rms_adamw": "adamw_rms",
    }
)
"""Formula of each name that another library has for it, as "library:name"."""


def scale_formula(mode: str) -> str:
    """The name of the formula that `mode` means.

    Args:
        mode: A formula's name, or "library:name".

    Raises:
        ConfigurationError: An unknown name, or a library's name without the library.
    """
    if mode in FORMULAS:
        return mode
    if mode in ALIASES:
        return ALIASES[mode]
    # "spectral" and "spectral_norm" are told apart by one library and mixed up by everyone else.
    meant = {alias: formula for alias, formula in ALIASES.items() if alias.partition(":")[2].startswith(mode)}
    if mode and meant:
        choices = ", ".join(f"{alias!r} ({formula})" for alias, formula in meant.items())
        raise ConfigurationError(
            f"scale={mode!r} is a library's name, and libraries mean different formulas by such names: say whose it "
            f"is, as in {choices}, or name the formula itself"
        )
    raise ConfigurationError(
        f"there is no scale {mode!r}. The formulas are {', '.join(map(repr, FORMULAS))}; by their names in other "
        f"libraries, {', '.join(map(repr, ALIASES))}"
    )


def scale_factor(mode: str, m: int, n: int, *, extra: float = 1.0) -> float:
    """What an orthogonalized matrix is multiplied by, beside the learning rate.

    Args:
        mode: A formula's name ("clamped_aspect", "max_dim", "aspect", "adamw_rms", "none"), or "library:name".
        m: Rows of the logical matrix, the outputs of the layer: of one head, one expert or one part of a fused weight,
            and never of a shard or of a padded matrix.
        n: Columns of the logical matrix, the inputs of the layer.
        extra: A further factor, such as Megatron-LM's extra_scale_factor. With "max_dim",
            sqrt((1 - beta1) / (1 + beta1)) gives the root mean square of AdamW's updates (https://kexue.fm/archives/11267).

    Raises:
        ConfigurationError: An unknown or ambiguous mode, or a matrix without rows or columns.
    """
    if m < 1 or n < 1:
        raise ConfigurationError(f"a matrix of shape {(m, n)} has no scale: both dims must be at least 1")
    return extra * FORMULAS[scale_formula(mode)](m, n)
