"""The policy objects of `fully_shard`: small, frozen, and interchangeable with torch FSDP2's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import fsdp as torch_fsdp

from hp_plugin.errors import ConfigurationError, UnsupportedError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each tensor of a unit has, and when.

    Attributes:
        param_dtype: Floating dtype of the full parameters in forward and backward. None: the shard's own dtype.
        reduce_dtype: Floating dtype in which gradients are summed over ranks and over micro-batches. None:
            `param_dtype`, or the shard's dtype when that is None too.
        inter_reduce_dtype: Floating dtype in which gradients travel and are summed between supernodes. None:
            `reduce_dtype`. A narrower one halves the bytes on the slow link at the price of rounding there.
        output_dtype: Floating outputs of the module's forward are cast to it. None: left alone.
        cast_forward_inputs: Whether floating inputs of the module's forward are cast to `param_dtype`.
        master_dtype: Floating dtype of the shard at rest, thus of what the optimizer updates. None: the dtype that
            the parameter had when it was sharded. A model built in bf16 gets fp32 master weights with
            `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | None = None
    inter_reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        dtype = self.inter_reduce_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(
                f"inter_reduce_dtype={dtype} is not a floating dtype; use torch.bfloat16, torch.float32 or None"
            )

    @classmethod
    def adopt(cls, policy: MixedPrecisionPolicy | torch_fsdp.MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """The same policy as ours; torch FSDP2's has the fields up to `cast_forward_inputs`."""
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, torch_fsdp.MixedPrecisionPolicy):
            return cls(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
        raise TypeError(
            f"mp_policy is a {type(policy).__name__}; expected hp_plugin.MixedPrecisionPolicy or "
            "torch.distributed.fsdp.MixedPrecisionPolicy (FSDP1's MixedPrecision is another class)"
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards rest: the base policy keeps them on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state rest in host memory. Not supported yet: `fully_shard` refuses it.

    Attributes:
        pin_memory: Whether the host memory would be pinned.
    """

    pin_memory: bool = True


def refuse_offload(policy: OffloadPolicy | torch_fsdp.OffloadPolicy) -> None:
    """Raises UnsupportedError for every policy that moves shards away from the device of the mesh."""
    if isinstance(policy, (CPUOffloadPolicy, torch_fsdp.CPUOffloadPolicy)):
        raise UnsupportedError(
            "offload_policy=CPUOffloadPolicy() is not supported yet; leave offload_policy at its default and lower "
            "the memory per rank with a larger dp_shard axis or activation checkpointing instead"
        )
    if not isinstance(policy, (OffloadPolicy, torch_fsdp.OffloadPolicy)):
        raise TypeError(f"offload_policy is a {type(policy).__name__}; expected OffloadPolicy or CPUOffloadPolicy")
