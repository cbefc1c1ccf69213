"""Building the optimizer of a HyperFSDP job from the pieces that stock Megatron would use.

Stock decides which parameters share a group, with which multipliers and overrides, and over which process groups
statistics are reduced. Those decisions are taken over by letting stock build its optimizer (which allocates no state
yet) and reading them off; the update itself is made on local shards.

Importing this module does not import Megatron.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hp_plugin.errors import UnsupportedError


def build_optimizer(stock_get_megatron_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The optimizer for model chunks that are wrapped in HyperFSDP. Every rank must call.

    Args:
        stock_get_megatron_optimizer: Megatron's own function.
        *args: Its arguments: `config`, `model_chunks`, `config_overrides`, `pg_collection` and so on.
        **kwargs: The same by name.

    Returns:
        A `MegatronOptimizer` that updates the fp32 shards in place.

    Raises:
        UnsupportedError: `config.optimizer` is neither `adam` nor `sgd`, or the optimizer state would not be plain
            fp32 on the device.
    """
    from hp_plugin.megatron.chained_shards import ChainedShardOptimizer
    config, chunks, args, kwargs = _take_config(args, kwargs)
    muon = muon_options()
    on_shards = all(hasattr(chunk, "mesh") for chunk in chunks)
    if not on_shards and muon is None:
        return stock_get_megatron_optimizer(config, chunks, *args, **kwargs)
    _refuse(config, "--use-hyperfsdp" if muon is None else "--use-hypermuon")
    # Shards are fp32 whatever the compute dtype is, so stock is asked for its fp32 optimizer.
    plain = copy.copy(config)
    plain.bf16 = plain.fp16 = False
    stock = stock_get_megatron_optimizer(plain, chunks, *args, **kwargs)
    stock_parts = getattr(stock, "chained_optimizers", [stock])  # dense parameters, then those of experts
    parts = [ShardOptimizer.from_stock(part, config, model_chunks=chunks) for part in stock_parts]
    return parts[0] if len(parts) == 1 else ChainedShardOptimizer(parts)


def _take_config(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], tuple[Any, ...], dict[str, Any]]:
    """Split off `config` and `model_chunks`, which callers pass by position or by name."""
    rest, named = list(args), dict(kwargs)
    config = rest.pop(0) if rest else named.pop("config")
    chunks = rest.pop(0) if rest else named.pop("model_chunks")
    return config, list(chunks), tuple(rest), named


def _refuse(config: Any) -> None:
    if config.optimizer not in ("adam", "sgd"):
        raise UnsupportedError(
            f"--optimizer {config.optimizer} cannot be combined with --use-hyperfsdp, which updates shards and "
            "therefore needs an element-wise optimizer; use --optimizer adam or sgd."
        )
    for attribute, flag in (
        ("use_distributed_optimizer", "--use-distributed-optimizer"),
        ("use_precision_aware_optimizer", "--use-precision-aware-optimizer"),
        ("optimizer_cpu_offload", "--optimizer-cpu-offload"),
    ):
        if getattr(config, attribute, False):
            raise UnsupportedError(f"{flag} cannot be combined with --use-hyperfsdp; remove the flag.")
