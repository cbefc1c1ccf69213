"""Which of Megatron's own flags HyperFSDP refuses, and why; and whether the topology fits the job.

The table is data so that ``hp-plugin check`` can read an argument file by it. A flag that is not in the
table works with HyperFSDP or has nothing to do with data parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron.flags import HyperFSDPOptions, flag_of


@dataclass(frozen=True)
class Conflict:
    """A Megatron flag that HyperFSDP does not work with.

    Attributes:
        flag: The flag as a user types it.
        attribute: Its name on Megatron's argument namespace. A release without it cannot conflict.
        refused: Whether a value of the attribute is refused.
        advice: Why, and what to do instead.
    """

    flag: str
    attribute: str
    refused: Callable[[object], bool]
    advice: str


def _is_on(value: object) -> bool:
    return bool(value)


def _above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _given(value: object) -> bool:
    return value is not None and value != []


def _other_than(*allowed: object) -> Callable[[object], bool]:
    return lambda value: value not in allowed


_OWN_SHARDING = "HyperFSDP shards parameters, gradients and optimizer states itself; remove the flag"
_OWN_BUCKETS = "it configures the buckets of Megatron's DDP, which HyperFSDP does not have; remove the flag"
_NO_GRAPHS = "CUDA graphs cannot capture parameters that are gathered and freed; use --cuda-graph-impl none"
_NOT_VERIFIED = "the combination has not been verified in this release; remove the flag or use --bf16"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--use-distributed-optimizer", "use_distributed_optimizer", _is_on, _OWN_SHARDING),
    Conflict("--overlap-param-gather", "overlap_param_gather", _is_on, _OWN_SHARDING),
    Conflict(
        "--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step", _is_on, _OWN_SHARDING
    ),
    Conflict(
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        _above_one,
        "replicas follow from the supernode size; use --hyperfsdp-shard-size instead",
    ),
    Conflict("--use-torch-fsdp2", "use_torch_fsdp2", _is_on, _OWN_SHARDING),
    Conflict("--use-megatron-fsdp", "use_megatron_fsdp", _is_on, _OWN_SHARDING),
    Conflict("--use-custom-fsdp", "use_custom_fsdp", _is_on, _OWN_SHARDING),
    Conflict("--use-layer-wise-distributed-optimizer", "use_layer_wise_distributed_optimizer", _is_on, _OWN_SHARDING),
    Conflict("--optimizer", "optimizer", _other_than("adam", "sgd"), "use --optimizer adam or sgd"),
    Conflict(
        "--use-precision-aware-optimizer",
        "use_precision_aware_optimizer",
        _is_on,
        "optimizer states are fp32; remove the flag",
    ),
    Conflict(
        "--optimizer-cpu-offload",
        "optimizer_cpu_offload",
        _is_on,
        "offloading is not available in this release; remove the flag",
    ),
    Conflict("--optimizer-cuda-graph", "optimizer_cuda_graph", _is_on, _NO_GRAPHS),
    Conflict(
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        _is_on,
        "groups of context parallelism that change with the batch have not been verified; remove the flag",
    ),
    Conflict("--tensor-parallel-num-weight-shards", "tensor_parallel_num_weight_shards", _given, _OWN_SHARDING),
    Conflict("--fp8-param-gather", "fp8_param_gather", _is_on, "shards are kept in fp32; remove the flag"),
    Conflict("--fp4-param-gather", "fp4_param_gather", _is_on, "shards are kept in fp32; remove the flag"),
    Conflict("--fp8-format", "fp8", _given, _NOT_VERIFIED),
    Conflict("--fp4-format", "fp4", _given, _NOT_VERIFIED),
    Conflict(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        _is_on,
        "it calls parts of a layer directly, so that the hooks that gather its parameters do not run; remove the flag",
    ),
    Conflict(
        "--delay-wgrad-compute",
        "delay_wgrad_compute",
        _is_on,
        "weight gradients would arrive after the layer has been reduced; remove the flag",
    ),
    Conflict(
        "--defer-embedding-wgrad-compute",
        "defer_embedding_wgrad_compute",
        _is_on,
        "weight gradients would arrive after the layer has been reduced; remove the flag",
    ),
    Conflict("--cuda-graph-impl", "cuda_graph_impl", _other_than(None, "none"), _NO_GRAPHS),
    Conflict("--enable-cuda-graph", "enable_cuda_graph", _is_on, _NO_GRAPHS),
    Conflict("--external-cuda-graph", "external_cuda_graph", _is_on, _NO_GRAPHS),
    Conflict(
        "--ckpt-format",
        "ckpt_format",
        _other_than(None, "torch_dist"),
        "use --ckpt-format torch_dist, which stock Megatron reads too",
    ),
    Conflict(
        "--ckpt-convert-format",
        "ckpt_convert_format",
        _given,
        "convert with stock Megatron; checkpoints are plain torch_dist",
    ),
    Conflict(
        "--non-persistent-ckpt-type",
        "non_persistent_ckpt_type",
        _other_than(None, "global"),
        "use --non-persistent-ckpt-type global",
    ),
    Conflict(
        "--ddp-reduce-scatter-with-fp32-accumulation", "ddp_reduce_scatter_with_fp32_accumulation", _is_on, _OWN_BUCKETS
    ),
    Conflict(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        _given,
        _OWN_BUCKETS,
    ),
    Conflict("--use-nccl-ub", "nccl_ub", _is_on, _OWN_BUCKETS),
    Conflict("--check-for-large-grads", "check_for_large_grads", _is_on, _OWN_BUCKETS),
    Conflict(
        "--save-wgrads-interval", "save_wgrads_interval", _given, "full gradients are never kept; remove the flag"
    ),
    Conflict("--inprocess-restart", "inprocess_restart", _is_on, "restart the whole job instead; remove the flag"),
    Conflict("--perform-rl-step", "perform_rl_step", _is_on, "only pretraining is supported in this release"),
    Conflict("--yaml-cfg", "yaml_cfg", _given, "give Megatron's arguments on the command line"),
)


_NO_BUCKETS = f"gradients are put into buckets by {flag_of('bucket_bytes')}"

WITHOUT_EFFECT: tuple[Conflict, ...] = (
    Conflict("--ddp-num-buckets", "ddp_num_buckets", _given, _NO_BUCKETS),
    Conflict("--ddp-bucket-size", "ddp_bucket_size", _given, _NO_BUCKETS),
    Conflict("--ddp-pad-buckets-for-high-nccl-busbw", "ddp_pad_buckets_for_high_nccl_busbw", _is_on, _NO_BUCKETS),
    Conflict("--ddp-average-in-collective", "ddp_average_in_collective", _is_on, "gradients are summed, then divided"),
)
"""Flags that tune Megatron's DDP and change no result: accepted, and said to do nothing."""


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """Refuse every combination of the table, all in one message.

    Raises:
        UnsupportedError: At least one refused flag is set.
    """
    found = [
        conflict
        for conflict in CONFLICTS
        if hasattr(args, conflict.attribute) and conflict.refused(getattr(args, conflict.attribute))
    ]
    if found:
        reasons = "; ".join(f"{_spell(conflict, args)} ({conflict.advice})" for conflict in found)
        raise UnsupportedError(f"--use-hyperfsdp cannot be combined with {reasons}.")


def adjust_megatron_arguments(args: argparse.Namespace) -> list[str]:
    """Switch off, or say to be without effect, what merely tunes another back end. Returns the lines to print."""
    lines = [
        f"{_spell(option, args)} has no effect with --use-hyperfsdp: {option.advice}."
        for option in WITHOUT_EFFECT
        if option.refused(getattr(args, option.attribute, None))
    ]
    if getattr(args, "gradient_accumulation_fusion", False):
        args.gradient_accumulation_fusion = False
        lines.append(
            "--no-gradient-accumulation-fusion switched on: the fused kernel adds into a main_grad buffer, "
            "which HyperFSDP does not keep."
        )
    return lines


def check_topology(args: argparse.Namespace, options: HyperFSDPOptions) -> None:
    """Refuse sizes that do not divide, as far as the command line alone can tell.

    Host names (``auto``) are known only once ranks can talk; the mesh is checked again when the model is wrapped.

    Raises:
        ConfigurationError: The supernode or shard size does not fit the number of ranks.
    """
    world, size = args.world_size, options.supernode_size
    if isinstance(size, int) and world % size:
        raise ConfigurationError(
            f"{flag_of('supernode_size')} {size} does not divide the {world} ranks of this job; "
            f"choose one of {_divisors(world)}."
        )
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    # Megatron's own sentence about a world that does not divide is better than ours; checkpoint arguments and
    # the other rank order change the groups after this point.
    if world % model_parallel or args.use_checkpoint_args or getattr(args, "use_tp_pp_dp_mapping", False):
        return
    data_parallel = world // model_parallel
    shard = options.shard_size
    if isinstance(shard, int) and data_parallel % shard:
        raise ConfigurationError(
            f"{flag_of('shard_size')} {shard} does not divide the data-parallel size {data_parallel} ({world} ranks / "
            f"{model_parallel} model-parallel); choose one of {_divisors(data_parallel)}."
        )
    _check_reshard(options)
    if isinstance(size, int):
        _check_groups(args.tensor_model_parallel_size, data_parallel, world, size, shard)


def _check_reshard(options: HyperFSDPOptions) -> None:
    shard, number = options.shard_size, options.reshard_after_forward
    if isinstance(shard, int) and not isinstance(number, bool) and shard % number:
        raise ConfigurationError(
            f"{flag_of('reshard_after_forward')} {number} does not divide {flag_of('shard_size')} {shard}; choose one "
            f"of {_divisors(shard)}, true or false."
        )


def _check_groups(tensor: int, data: int, world: int, size: int, shard: int | str) -> None:
    for stage_start in range(0, world, tensor * data):
        for first in range(stage_start, stage_start + tensor):
            ranks = range(first, first + tensor * data, tensor)
            counts: dict[int, int] = {}
            for rank in ranks:
                counts[rank // size] = counts.get(rank // size, 0) + 1
            if len(set(counts.values())) > 1:
                raise ConfigurationError(
                    f"{flag_of('supernode_size')} {size} does not divide the data-parallel size {data}: of the "
                    f"data-parallel group {_listed(ranks)}, the supernodes hold {_listed(counts.values())} ranks, "
                    "and all must hold the same number; choose another supernode size."
                )
            inside = next(iter(counts.values()))
            if isinstance(shard, int) and inside % shard:
                raise ConfigurationError(
                    f"{flag_of('shard_size')} {shard} does not divide the {inside} ranks that a supernode of "
                    f"{size} holds of a data-parallel group; choose one of {_divisors(inside)}, or world."
                )


def _spell(conflict: Conflict, args: argparse.Namespace) -> str:
    value = getattr(args, conflict.attribute)
    return conflict.flag if isinstance(value, (bool, list)) else f"{conflict.flag} {value}"


def _divisors(number: int) -> str:
    return _listed(d for d in range(1, number + 1) if number % d == 0)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
