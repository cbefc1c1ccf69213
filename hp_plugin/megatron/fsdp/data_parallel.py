"""Where HyperFSDP meets Megatron's model: the wrapper class, what it takes from the arguments, and its units.

Importing this module does not import Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hp_plugin.errors import ConfigurationError

_REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def hyperfsdp_class() -> type:
    """The data-parallel class to put in the place of Megatron's `DistributedDataParallel`. Imports Megatron."""
    from hp_plugin.megatron.fsdp.wrapper import HyperFSDP

    return HyperFSDP


def asks_for_hyperfsdp() -> bool:
    """Whether Megatron's arguments say so at this moment: those of a reference on one rank do not."""
    try:
        from megatron.training import get_args

        return bool(get_args().use_hyperfsdp)
    except (ImportError, AssertionError, AttributeError):  # a model that is built outside a job
        return True


@dataclass(frozen=True)
class WrapperOptions:
    """What the wrapper needs to know beyond the configuration objects that Megatron hands it.

    Attributes:
        supernode_size: Ranks per supernode, or "auto" to go by host names.
        shard_size: Over how many data-parallel ranks a parameter is split.
        reshard_after_forward: Free the full parameters between forward and backward; a number as in `fully_shard`.
        bucket_bytes: As in `fully_shard`; so are the two below.
        window: See there.
        prefetch: See there.
        transport: As in `fully_shard`.
        optimizer_sharding: As in `fully_shard`.
        deterministic: As in `fully_shard`.
        reduce_dtype: Dtype of the gradient reduction; None follows Megatron's `grad_reduce_in_fp32`.
        random_init: Data-parallel ranks initialised the model differently; rank 0 of each group has the right one.
    """

    supernode_size: int | Literal["auto"] = "auto"
    shard_size: int | Literal["supernode", "world"] = "supernode"
    reshard_after_forward: bool | int = True
    bucket_bytes: int | None = None
    window: int | None = None
    prefetch: int | None = None
    transport: str = "auto"
    optimizer_sharding: str = "auto"
    deterministic: bool = False
    reduce_dtype: torch.dtype | None = None
    random_init: bool = False


def options_from_arguments() -> WrapperOptions:
    """Read the options from Megatron's global arguments, where the parser of `flags` left them resolved.

    The wrapper's constructor has Megatron's signature, so there is no other way in.
    """
    from megatron.training import get_args

    args = get_args()
    return WrapperOptions(
        supernode_size=args.hyperfsdp_supernode_size,
        shard_size=args.hyperfsdp_shard_size,
        reshard_after_forward=args.hyperfsdp_reshard_after_forward,
        bucket_bytes=args.hyperfsdp_bucket_bytes,
        window=args.hyperfsdp_window,
        prefetch=args.hyperfsdp_prefetch,
        transport=args.hyperfsdp_transport,
        optimizer_sharding=args.hyperfsdp_optimizer_sharding,
        deterministic=args.hyperfsdp_deterministic,
        reduce_dtype=_REDUCE_DTYPES.get(args.hyperfsdp_reduce_dtype),
        random_init=args.data_parallel_random_init,
    )


def compute_dtype(parameters: Sequence[tuple[str, torch.Tensor]], default: torch.dtype) -> torch.dtype:
    """The one dtype in which the model computes.

    Args:
        parameters: Names and tensors, before they are sharded.
        default: Result for a pipeline stage without parameters.

    Raises:
        ConfigurationError: Parameters have different dtypes, which one compute dtype for all would change.
    """
    found: dict[torch.dtype, str] = {}
    for name, parameter in parameters:
        found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise ConfigurationError(
            f"the parameters of the model have different dtypes ({listed}); HyperFSDP gathers all of them in one "
            "compute dtype. Build the model in a single dtype."
        )
    return next(iter(found), default)


def unit_modules(model: torch.nn.Module, is_layer: Callable[[torch.nn.Module], bool]) -> list[torch.nn.Module]:
    """Modules inside `model` that become units of their own, in forward order; the rest is the root unit.

    Every transformer layer is one. Embedding and output layer are units only if their weights are not tied: a tied
    weight is read by the model itself, outside the forward of the module that holds it, so it must be gathered with the
    root. Modules without parameters are left out.

    Args:
        model: The model inside all wrappers.
        is_layer: Tells a transformer layer.
    """
    tied = getattr(model, "share_embeddings_and_output_weights", True)
    ends = [] if tied else [getattr(model, name, None) for name in ("embedding", "output_layer")]
    units: list[torch.nn.Module] = []
    taken: set[int] = set()
    for module in model.modules():
        if id(module) in taken or not any(True for _ in module.parameters()):
            continue
        if is_layer(module) or any(module is end for end in ends):
            units.append(module)
            taken.update(id(inner) for inner in module.modules())
    return units


def is_first_chunk(model: Any, *, later: bool = False) -> bool:
    """Whether `model` is the first (or only) chunk of the interleaved pipeline on this rank.

    Args:
        model: The chunk inside all wrappers.
        later: What counts where the chunk does not know its stage, as in Megatron 0.12: there `disable_bucketing` is
            True for all chunks but the first.
    """
    if not hasattr(model, "vp_stage"):
        return not later
    return model.vp_stage in (None, 0)
