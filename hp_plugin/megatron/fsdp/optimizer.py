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
from hp_plugin.megatron.releases.differences import decouples_weight_decay


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
    from hp_plugin.megatron.fsdp.chained_shards import ChainedShardOptimizer
    from hp_plugin.megatron.fsdp.shard_optimizer import ShardOptimizer

    config, chunks, args, kwargs = _take_config(args, kwargs)
    muon = _muon_options()
    if muon is None and not _on_shards(chunks):
        return stock_get_megatron_optimizer(config, chunks, *args, **kwargs)
    _refuse(config, with_muon=muon is not None)
    # Shards are fp32 whatever the compute dtype is, so stock is asked for its fp32 optimizer.
    plain = copy.copy(config)
    plain.bf16 = plain.fp16 = False
    stock = stock_get_megatron_optimizer(plain, chunks, *args, **kwargs)
    stock_parts = getattr(stock, "chained_optimizers", [stock])  # dense parameters, then those of experts
    if muon is not None:
        from hp_plugin.megatron.muon import optimizer as muon_optimizer

        return muon_optimizer.build(stock_parts, config, chunks, muon)
    parts = [ShardOptimizer.from_stock(part, config, model_chunks=chunks) for part in stock_parts]
    return parts[0] if len(parts) == 1 else ChainedShardOptimizer(parts)


def _take_config(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], tuple[Any, ...], dict[str, Any]]:
    """Split off `config` and `model_chunks`, which callers pass by position or by name."""
    rest, named = list(args), dict(kwargs)
    config = rest.pop(0) if rest else named.pop("config")
    chunks = rest.pop(0) if rest else named.pop("model_chunks")
    return config, list(chunks), tuple(rest), named


def _on_shards(chunks: Sequence[Any]) -> bool:
    """Whether the model is wrapped in HyperFSDP, and not in Megatron's DDP."""
    return all(hasattr(chunk, "mesh") for chunk in chunks)


def _muon_options() -> Any:
    """The options of `--use-hypermuon`, None without it."""
    try:
        from megatron.training import get_args

        args = get_args()
    except (ImportError, AssertionError):  # megatron.core alone, or a model that is built outside a job
        return None
    if not getattr(args, "use_hypermuon", False):
        return None
    from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions

    return HyperMuonOptions.from_args(args)


def _refuse(config: Any, *, with_muon: bool) -> None:
    allowed, switch = (("adam",), "--use-hypermuon") if with_muon else (("adam", "sgd"), "--use-hyperfsdp")
    if config.optimizer not in allowed:
        what = (
            "which trains what is no matrix with AdamW"
            if with_muon
            else "which updates shards and therefore needs an element-wise optimizer"
        )
        raise UnsupportedError(
            f"--optimizer {config.optimizer} cannot be combined with {switch}, {what}; use --optimizer "
            f"{' or '.join(allowed)}."
        )
    if with_muon and not decouples_weight_decay(config):
        raise UnsupportedError(
            "decoupled_weight_decay=False of Megatron's OptimizerConfig (L2 regularisation) cannot be combined with "
            "--use-hypermuon, whose weight decay is decoupled; leave it True."
        )
    for attribute, flag in (
        ("use_distributed_optimizer", "--use-distributed-optimizer"),
        ("use_precision_aware_optimizer", "--use-precision-aware-optimizer"),
        ("optimizer_cpu_offload", "--optimizer-cpu-offload"),
    ):
        if getattr(config, attribute, False):
            raise UnsupportedError(f"{flag} cannot be combined with {switch}; remove the flag.")
