"""In which dtype a job computes, and how DeepSpeed's engine is kept from doing the same by its own means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from hp_plugin.core.fsdp import MixedPrecisionPolicy
from hp_plugin.errors import ConfigurationError, UnsupportedError

_NAMES = {torch.float16: ("fp16", "float16", "half"), torch.bfloat16: ("bf16", "bfloat16"), None: ("fp32", "float32")}


def compute_dtype(config: Any) -> torch.dtype | None:
    """The 16-bit dtype that a `DeepSpeedConfig` asks for; None in fp32.

    Raises:
        UnsupportedError: fp16 on a device that DeepSpeed holds incapable of it.
        ConfigurationError: `data_types.param_dtype` says another dtype.
    """
    if config.float16_config.enabled:
        if not get_accelerator().is_fp16_supported():
            raise UnsupportedError(
                f"the device {get_accelerator().device_name()} cannot compute in fp16; use "
                '"bf16": {"enabled": true} instead of "fp16".'
            )
        dtype: torch.dtype | None = torch.float16
    else:
        dtype = torch.bfloat16 if config.bfloat16_config.enabled else None
    said = getattr(config, "param_dtype", None)
    if said is not None and str(said).removeprefix("torch.") not in _NAMES[dtype]:
        raise ConfigurationError(
            f'"data_types.param_dtype" is {said!r}, but the blocks "fp16" and "bf16" ask for {_NAMES[dtype][0]}; '
            "remove the former."
        )
    return dtype


def policy_for(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Dtypes of all units: masters, sums of gradients and optimizer state are fp32 always."""
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, master_dtype=torch.float32, cast_forward_inputs=False
    )


@contextlib.contextmanager
def fp32_inside(config: Any) -> Iterator[None]:
    """DeepSpeed's own 16-bit modes cast the module and wrap the optimizer: inside, it believes that all is fp32."""
    switches: list[tuple[Any, str, Any]] = [
        (config.float16_config, "enabled", False),
        (config.bfloat16_config, "enabled", False),
    ]
    if hasattr(config, "param_dtype"):
        switches.append((config, "param_dtype", None))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in switches]
    for owner, name, value in switches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
