"""Acts on the rules for Megatron's own flags (`rules`); and whether the topology fits the job."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron.arguments.flags import HyperFSDPOptions, flag_of
from hp_plugin.megatron.arguments.rules import ADJUSTED, CONFLICTS, SWITCHED_OFF, WITHOUT_EFFECT, Conflict, SwitchedOff
from hp_plugin.megatron.checkpoints import saved_format

__all__ = [
    "ADJUSTED",
    "CONFLICTS",
    "SWITCHED_OFF",
    "WITHOUT_EFFECT",
    "Conflict",
    "SwitchedOff",
    "adjust_megatron_arguments",
    "check_megatron_arguments",
    "check_observed_arguments",
    "check_topology",
]


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """Refuse every combination of the table, all in one message.

    Raises:
        UnsupportedError: At least one refused flag is set.
    """
    reasons = _conflicts(args)
    if reasons:
        raise UnsupportedError(f"--use-hyperfsdp cannot be combined with {'; '.join(reasons)}.")


def check_observed_arguments(args: argparse.Namespace, options: HyperFSDPOptions) -> list[str]:
    """For `--hyperfsdp-migrate observe`: lines that say what HyperFSDP would refuse; nothing is changed.

    Raises:
        UnsupportedError: The job does not run on Megatron's DDP, which is what can be observed.
        ConfigurationError: As :func:`check_topology`.
    """
    for attribute, flag in (
        ("use_hypermuon", "--use-hypermuon"),
        ("use_torch_fsdp2", "--use-torch-fsdp2"),
        ("use_megatron_fsdp", "--use-megatron-fsdp"),
    ):
        if getattr(args, attribute, False):
            raise UnsupportedError(
                f"{flag_of('migrate')} observe cannot be combined with {flag}: it watches a job on Megatron's "
                "DistributedDataParallel, with or without the distributed optimizer; remove one of the two."
            )
    check_topology(args, options)
    return [f"observe: --use-hyperfsdp alone would refuse {reason}." for reason in _conflicts(args)]


def _conflicts(args: argparse.Namespace) -> list[str]:
    return [
        f"{_spell(conflict, args)} ({conflict.advice})"
        for conflict in CONFLICTS
        if hasattr(args, conflict.attribute) and conflict.refused(getattr(args, conflict.attribute))
    ]


def adjust_megatron_arguments(args: argparse.Namespace) -> list[str]:
    """Switch off, replace, or say to be without effect, what belongs to another back end. Returns the lines to print.

    Megatron's own checks come later and see the adjusted namespace: `--overlap-param-gather`, say, would be an error
    without `--use-distributed-optimizer`.
    """
    lines = saved_format.decide(args)
    lines += [
        f"{_spell(option, args)} has no effect with --use-hyperfsdp: {option.advice}."
        for option in WITHOUT_EFFECT
        if option.refused(getattr(args, option.attribute, None))
    ]
    for option in SWITCHED_OFF:
        if option.refused(getattr(args, option.attribute, None)):
            lines.append(f"{_spell(option, args)} is accepted and switched off with --use-hyperfsdp: {option.advice}.")
            setattr(args, option.attribute, copy.copy(option.value))
    for adjusted in ADJUSTED:
        if adjusted.refused(getattr(args, adjusted.attribute, None)):
            lines.append(f"{_spell(adjusted, args)} with --use-hyperfsdp: {adjusted.advice}.")
            _replace(args, adjusted.attribute)
    return lines


def _replace(args: argparse.Namespace, attribute: str) -> None:
    if attribute == "main_grads_dtype":
        args.main_grads_dtype, args.grad_reduce_in_bf16 = "fp32", True
        args.accumulate_allreduce_grads_in_fp32 = False
    else:
        setattr(args, attribute, False)
    if attribute == "ddp_reduce_scatter_with_fp32_accumulation":
        args.hyperfsdp_deterministic = True


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
        stage = world // args.pipeline_model_parallel_size
        _check_groups("data-parallel", _groups(world, stage, args.tensor_model_parallel_size), size, shard)
        expert_parallel = getattr(args, "expert_model_parallel_size", 1)
        expert_tensor = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
        stride = expert_parallel * expert_tensor
        if expert_parallel > 1 and stage % stride == 0:
            # A number of ranks per shard is taken for experts as far as it divides their smaller groups.
            _check_groups("expert-data-parallel", _groups(world, stage, stride), size, "supernode")


def _check_reshard(options: HyperFSDPOptions) -> None:
    shard, number = options.shard_size, options.reshard_after_forward
    if isinstance(shard, int) and not isinstance(number, bool) and shard % number:
        raise ConfigurationError(
            f"{flag_of('reshard_after_forward')} {number} does not divide {flag_of('shard_size')} {shard}; choose one "
            f"of {_divisors(shard)}, true or false."
        )


def _groups(world: int, stage: int, stride: int) -> Iterator[range]:
    """The groups of ranks `stride` apart inside each pipeline stage of `stage` consecutive ranks."""
    for start in range(0, world, stage):
        for first in range(start, start + stride):
            yield range(first, start + stage, stride)


def _check_groups(kind: str, groups: Iterable[range], size: int, shard: int | str) -> None:
    for ranks in groups:
        counts: dict[int, int] = {}
        for rank in ranks:
            counts[rank // size] = counts.get(rank // size, 0) + 1
        if len(set(counts.values())) > 1:
            raise ConfigurationError(
                f"{flag_of('supernode_size')} {size} does not divide the {kind} size {len(ranks)}: of the "
                f"{kind} group {_listed(ranks)}, the supernodes hold {_listed(counts.values())} ranks, "
                "and all must hold the same number; choose another supernode size."
            )
        inside = next(iter(counts.values()))
        if isinstance(shard, int) and inside % shard:
            raise ConfigurationError(
                f"{flag_of('shard_size')} {shard} does not divide the {inside} ranks that a supernode of "
                f"{size} holds of a {kind} group; choose one of {_divisors(inside)}, or world."
            )


def _spell(conflict: Conflict, args: argparse.Namespace) -> str:
    value = getattr(args, conflict.attribute)
    return conflict.flag if isinstance(value, (bool, list)) else f"{conflict.flag} {value}"


def _divisors(number: int) -> str:
    return _listed(d for d in range(1, number + 1) if number % d == 0)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
