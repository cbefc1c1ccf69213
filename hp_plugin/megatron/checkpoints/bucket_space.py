"""Where a parameter lies in the buckets of stock Megatron's distributed optimizer.

With `dp_reshardable` that optimizer saves its state as it keeps it: one flat tensor per bucket of the gradient buffers
of Megatron's DDP. Which parameters a bucket has, and where, is the outcome of stock's layout code for the job that
saved. That code is run here over stand-ins of the full parameters. What data-parallel size the job had changes only
the padding behind a bucket, which is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.slices import stand_in

_DEFAULT_BUCKET = 40_000_000  # elements, or a million per data-parallel rank, whichever is more: Megatron's own rule


_RESHARDABLE_BY = {
    "dp_reshardable": "--dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "--ckpt-fully-parallel-save",
}
"""By format: stock's flag for one that fits every cut of the model."""


@dataclass(frozen=True)
class Place:
    """Where one parameter lies.

    Attributes:
        key: Of the bucket, behind `optimizer.distributed.dp_group_idx_<index>.`, without the name of a state.
        start: Of the flattened parameter, within the bucket.
        length: Elements of the bucket.
    """

    key: str
    start: int
    length: int


@dataclass(frozen=True)
class Saver:
    """What of a job's arguments its buckets depend on.

    Attributes:
        bucket_size: Elements per bucket in the first chunk of the first pipeline stage; None for one bucket.
        buckets: Number of buckets asked for instead; None if a size was.
        grad_reduce_in_fp32: Whether gradient buffers are fp32.
    """

    bucket_size: int | None
    buckets: int | None
    grad_reduce_in_fp32: bool

    @classmethod
    def of(cls, args: Any, name: str) -> Saver:
        """Read off the argument namespace that a checkpoint has.

        Args:
            args: The namespace.
            name: Of the format that is read.

        Raises:
            UnsupportedError: It is missing, or the model was cut in another way than that of this job.
        """
        if args is None:
            raise UnsupportedError(_no_arguments(name))
        _check_model_parallel(args, name)
        if not getattr(args, "overlap_grad_reduce", False):
            return cls(None, None, bool(args.accumulate_allreduce_grads_in_fp32))
        ranks = args.data_parallel_size * getattr(args, "context_parallel_size", 1)
        size = getattr(args, "ddp_bucket_size", None) or max(_DEFAULT_BUCKET, 1_000_000 * ranks)
        return cls(size, getattr(args, "ddp_num_buckets", None), bool(args.accumulate_allreduce_grads_in_fp32))


def places(chunks: Sequence[Any], saver: Saver, *, of_experts: bool) -> dict[int, Place]:
    """The place of every trainable parameter of `chunks`, by `id`. No communication.

    Args:
        chunks: The model chunks of this rank, in HyperFSDP.
        saver: The job whose checkpoint is read.
        of_experts: Parameters of experts, under expert parallelism, rather than all others.
    """
    found: dict[int, Place] = {}
    buffer = 0
    for number, chunk in enumerate(chunks):
        standing = {
            stand_in(parameter, chunk.compute_dtype): parameter
            for parameter in chunk.module.parameters()
            if parameter.requires_grad
        }
        for key, layout in _layouts(list(standing), bucket_size(saver, chunks, number), saver).items():
            if key.is_expert_parallel != of_experts:
                continue
            prefix = f"gbuf_idx_{buffer}.dtype_{(key.param_dtype, key.grad_dtype)}.bucket_idx_"
            for parameter, (start, _, bucket) in layout.param_index_map.items():
                first = layout.bucket_indices[bucket][0]
                length = layout.per_bucket_numel_unpadded[bucket]
                found[id(standing[parameter])] = Place(f"{prefix}{bucket}", start - first, length)
            buffer += 1
    return found


def _layouts(parameters: list[torch.nn.Parameter], bucket_size: int | None, saver: Saver) -> dict[Any, Any]:
    compute = getattr(DistributedOptimizer, "compute_full_param_layout", None)
    if compute is None:
        raise UnsupportedError(
            "this release of Megatron has no code that says where its distributed optimizer keeps parameters, so its "
            "checkpoints in bucket space cannot be read; save with --dist-ckpt-optim-fully-reshardable, or load with "
            "--no-load-optim."
        )
    config = SimpleNamespace(grad_reduce_in_fp32=saver.grad_reduce_in_fp32, pad_buckets_for_high_nccl_busbw=False)
    layouts: dict[Any, Any] = compute(parameters, bucket_size, 1, config, expert_data_parallel_world_size=1).layouts
    return layouts


def is_of_experts(owner: Any) -> bool:
    """Whether an optimizer has the parameters of experts under expert parallelism."""
    return any(not getattr(parameter, "allreduce", True) for parameter in owner.parameters)


def bucket_size(saver: Saver, chunks: Sequence[Any], number: int) -> int | None:
    """Elements per bucket in the chunk `number`, by stock's rule: only the first of the first stage has several."""
    if number or saver.bucket_size is None or parallel_state.get_pipeline_model_parallel_rank() > 0:
        return None
    if saver.buckets is None:
        return saver.bucket_size
    elements = sum(parameter.numel() for chunk in chunks for parameter in chunk.module.parameters())
    return elements // saver.buckets


def _check_model_parallel(args: Any, name: str) -> None:
    def size(name: str) -> int:
        return getattr(args, name, None) or 1

    here = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    changed = [f"{name} {size(name)} (now {now})" for name, now in here.items() if size(name) != now]
    if changed:
        raise UnsupportedError(
            f"the optimizer state of this checkpoint is in the distributed optimizer's format {name}, whose buckets "
            f"fit one cut of the model only: it was saved with {', '.join(changed)}. Load it with the same sizes first "
            f"and save again, save it in stock Megatron with {_RESHARDABLE_BY[name]}, or load weights alone with "
            "--no-load-optim."
        )


def _no_arguments(name: str) -> str:
    return (
        f"the checkpoint has an optimizer state in the distributed optimizer's format {name}, but not the arguments of "
        f"the job that saved it, without which its buckets cannot be read; save it with {_RESHARDABLE_BY[name]}, or "
        "load it with --no-load-optim."
    )
