"""The distributed optimizer's format `dp_zero_gather_scatter`: of Megatron 0.12 with --no-ckpt-fully-parallel-save.

The first data-parallel rank of every cut of the model has gathered the states and has written them as one object: for
each gradient buffer of Megatron's DDP, the flat tensors `param`, `exp_avg` and `exp_avg_sq`, without the padding at the
end of the buffer's buckets. The first rank here reads the object, which must fit its host memory, and broadcasts the
states parameter by parameter; every rank keeps its rows. So it fits jobs of the same model-parallel sizes, with any
number of data-parallel ranks.

Where a parameter lies follows from the rules of Megatron's DDP for the job that saved (`param_and_grad_buffer.py` of
0.12): parameters in reverse order, each at a multiple of 64 elements; a bucket ends once it has its size, and an
embedding that pipeline stages share has one of its own. The sum is compared with what was saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.bucket_space import Saver, bucket_size, is_of_experts
from hp_plugin.megatron.checkpoints.slices import HeldRows

GATHERED = "dp_zero_gather_scatter"
OBJECT, PLACES = "hyperfsdp_gathered", "hyperfsdp_places"

_ALIGNMENT, _BUCKET_ALIGNMENT, _WIDE_ALIGNMENT = 64, 128, 2**16  # elements
_AT_ONCE = 2**24  # elements that are broadcast at a time


@dataclass(frozen=True)
class GatheredPlace:
    """Where one parameter lies.

    Attributes:
        buffer: Number of the gradient buffer.
        start: Of the flattened parameter in it.
        total: Elements of the buffer.
    """

    buffer: int
    start: int
    total: int


def describe(owner: Any, saver: Any, prefix: str) -> dict[str, Any]:
    """What `owner` reads beside its parameter groups: the object on the first data-parallel rank.

    Args:
        owner: A `ShardOptimizer`.
        saver: The arguments of the job that saved.
        prefix: Of the keys of this cut of the model.

    Raises:
        UnsupportedError: The model is cut in another way than in the job that saved.
    """
    # First on every axis of the mesh: it reads, and is where broadcasts begin.
    first = not any(owner.mesh.get_coordinate())
    found = places(owner.model_chunks, saver, of_experts=is_of_experts(owner))
    ordered = tuple(found[id(parameter)] for parameter in owner.parameters)
    whole = ShardedObject(f"{prefix}.param_state", None, (1,), (0,)) if first else LocalNonpersistentObject(None)
    return {OBJECT: whole, PLACES: LocalNonpersistentObject(ordered)}


def places(chunks: Sequence[Any], saver: Any, *, of_experts: bool) -> dict[int, GatheredPlace]:
    """The place of every trainable parameter of `chunks`, by `id`. No communication.

    Args:
        chunks: The model chunks of this rank, in HyperFSDP.
        saver: The arguments of the job that saved.
        of_experts: Parameters of experts, under expert parallelism, rather than all others.

    Raises:
        UnsupportedError: The model is cut in another way than in the job that saved.
    """
    rule = Saver.of(saver, GATHERED)
    ranks = saver.data_parallel_size * getattr(saver, "context_parallel_size", 1)
    wide = getattr(saver, "ddp_pad_buckets_for_high_nccl_busbw", False)
    alignment = math.lcm(ranks, _BUCKET_ALIGNMENT, _WIDE_ALIGNMENT if wide else 1)
    found: dict[int, GatheredPlace] = {}
    for number, chunk in enumerate(chunks):
        parameters = [
            parameter
            for parameter in chunk.module.parameters()
            if parameter.requires_grad and of_experts != getattr(parameter, "allreduce", True)
        ]
        starts, total = _starts(parameters, bucket_size(rule, chunks, number), ranks, alignment)
        buffer = len({place.buffer for place in found.values()})
        found.update({id(p): GatheredPlace(buffer, start, total) for p, start in zip(parameters, starts)})
    return found


def _starts(parameters: Sequence[torch.Tensor], size: int | None, ranks: int, alignment: int) -> tuple[list[int], int]:
    """Start of each parameter without the padding behind buckets, and the number of elements of all buckets."""
    starts: list[int] = []
    position = bucket = 0  # in the buffer, with padding
    before = 0  # elements of finished buckets
    filled = False
    for parameter in reversed(parameters):
        position = _up(position, _ALIGNMENT)
        alone = getattr(parameter, "shared_embedding", False)
        if alone:
            position = _up(position, alignment) if position % ranks else position
            if filled:
                before, bucket = before + position - bucket, _up(position, alignment)
        starts.append(before + position - bucket)
        position += parameter.numel()
        filled = not (alone or (size is not None and position - bucket >= size))
        if not filled:
            before, bucket = before + position - bucket, _up(position, alignment)
            position = bucket
    return starts[::-1], before + (position - bucket if filled else 0)


def _up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


# ------------------------------------------------------------------------------------------------ after reading


@torch.no_grad()
def scatter(
    owner: Any,
    state_dict: Mapping[str, Any],
    held: Sequence[HeldRows],
    targets: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Fill `targets` from what :func:`describe` has read. Every rank of the data-parallel mesh must call.

    Args:
        owner: The optimizer.
        state_dict: As loaded.
        held: The rows of each parameter that this rank holds.
        targets: For each parameter, by the name of a state in the checkpoint, the tensor of these rows.

    Raises:
        UnsupportedError: On the first rank: buffers are not laid out as expected.
    """
    buffers = None if state_dict.get(OBJECT) is None else _buffers(state_dict[OBJECT])
    for place, rows, wanted in zip(state_dict[PLACES], held, targets, strict=True):
        if buffers is not None:
            _check(buffers, place)
        for name, target in wanted.items():
            whole = None if buffers is None else buffers[place.buffer][name][place.start :]
            _spread(owner, whole, rows, target)


def _buffers(state: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """The tensors of each buffer. Buffers are numbered; each is of one pair of dtypes."""
    return [next(iter(state[number].values())) for number in sorted(key for key in state if isinstance(key, int))]


def _check(buffers: Sequence[Mapping[str, Any]], place: GatheredPlace) -> None:
    saved = buffers[place.buffer]["numel_unpadded"] if place.buffer < len(buffers) else 0
    if place.start < 0 or saved != place.total:
        raise UnsupportedError(
            f"gradient buffer {place.buffer} has {saved} elements in the checkpoint, in the distributed optimizer's "
            f"format {GATHERED}, and should have {place.total} for this model; use the model arguments of the job that "
            "saved it, save it in Megatron 0.12 with --ckpt-fully-parallel-save, or load weights alone with "
            "--no-load-optim."
        )


def _spread(owner: Any, whole: torch.Tensor | None, rows: HeldRows, target: torch.Tensor) -> None:
    """Broadcast one flattened parameter, of which `whole` is the beginning on the first rank; keep `rows` of it."""
    row, total = math.prod(rows.shape[1:]), math.prod(rows.shape)
    flat = local_tensor(target).view(-1)
    for begin in range(0, total, _AT_ONCE):
        length = min(_AT_ONCE, total - begin)
        values = torch.empty(length, dtype=torch.float32, device=owner.device)
        if whole is not None:
            values.copy_(whole[begin : begin + length])
        _broadcast(owner.mesh, values)
        done = 0
        for segment in rows.segments:
            start, stop = segment.start * row, (segment.start + segment.length) * row
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                flat[done + low - start : done + high - start] = values[low - begin : high - begin]
            done += stop - start


def _broadcast(mesh: Any, values: torch.Tensor) -> None:
    """From the first rank of the mesh to all, axis by axis."""
    coordinate = list(mesh.get_coordinate())
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1 or any(coordinate[axis + 1 :]):
            continue
        source = [*coordinate[:axis], 0, *coordinate[axis + 1 :]]
        dist.broadcast(values, src=int(mesh.mesh[tuple(source)]), group=mesh.get_group(axis))
