"""The distributed optimizer's format `fully_sharded_model_space`, the default of Megatron 0.12.

A state has the key `optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<parameter>`. What one tensor- and
pipeline-parallel rank holds of the parameter is flattened, and every data-parallel rank writes a range of it. On disk
a tensor of shape (X, Y) that is cut into a grid of x by y blocks has therefore the shape (x, y, X/x * Y/y): one row of
elements per block.

A rank of HyperFSDP holds whole rows of its block, which are one range of the flattened block. Megatron 0.12 reads and
writes such ranges itself, for any grid, and they are given to it as its own optimizer does (:func:`ranges`). Newer
releases have no flattened ranges. There the runs of elements that the rows consist of are read from the blocks as they
lie in the checkpoint, for any grid (:func:`runs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.opened import Opened
from hp_plugin.megatron.checkpoints.slices import HeldRows, Template, boxes, replica_id_of
from hp_plugin.megatron.releases.differences import takes_irregular_grids

MODEL_SPACE = "fully_sharded_model_space"
MASTER = "fp32_param"
"""What the fp32 weight is called; it is there in fp32 jobs too."""

_WAY_OUT = "save the checkpoint once more under Megatron 0.12, or load weights alone with --no-load-optim."


def entry(opened: Opened, template: Template, held: HeldRows, local: torch.Tensor, *, name: str, chain: str) -> Any:
    """What this rank puts into a sharded state dict to read the state `name` of one parameter.

    Args:
        opened: The checkpoint.
        template: Megatron's description of the whole parameter.
        held: The rows that this rank holds.
        local: Where they are read to, shape `held.local_shape`.
        name: Of the state in the checkpoint.
        chain: What Megatron puts before the keys of this optimizer after it has described itself; often nothing.

    Returns:
        Something of which loading makes a tensor with the elements of `local`, flat or in its shape.

    Raises:
        UnsupportedError: The state is not in the checkpoint, or not in a form that can be read.
    """
    saved = _key(opened, f"optimizer.state.{name}.{template.key}", chain)
    asked = saved[len(chain) :]
    if takes_irregular_grids():
        return runs(_Blocks.of(opened, saved), template, held, local, key=asked)
    return ranges(template, held, local, key=asked)


# ------------------------------------------------------------------------------------------------ as Megatron 0.12


def ranges(template: Template, held: HeldRows, local: torch.Tensor, *, key: str) -> Any:
    """The rows `held` as a flattened range of what this model-parallel rank holds of the parameter; to read or write.

    Only for Megatron 0.12. Arguments as of :func:`entry`; `key` is put in place of that of the template.

    Raises:
        UnsupportedError: The rows are not one range.
    """
    if not held.segments:
        return LocalNonpersistentObject(local.reshape(-1))
    if len(held.segments) > 1:
        raise UnsupportedError(
            f"the rows that this rank holds of {key} are {len(held.segments)} runs; Megatron 0.12 takes one range of a "
            f"tensor in {MODEL_SPACE}. Use a mesh whose shards are contiguous, or drop --use-distributed-optimizer."
        )
    (segment,) = held.segments
    row = math.prod(held.shape[1:])
    changes: dict[str, Any] = {
        "key": key,
        "data": local.reshape(-1),
        "flattened_range": slice(segment.start * row, (segment.start + segment.length) * row),
        "replica_id": replica_id_of(template, held),
    }
    if isinstance(template, ShardedTensor):
        changes["dtype"] = local.dtype
    return replace(template, **changes)


# ------------------------------------------------------------------------------------------------ block by block


@dataclass(frozen=True)
class _Blocks:
    """A tensor as it lies in a checkpoint.

    Attributes:
        key: Its name there.
        shape: Of the global tensor.
        grid: Number of blocks along each of its axes.
    """

    key: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, opened: Opened, key: str) -> _Blocks:
        added = getattr(opened.tensors, "mcore_data", None) or {}
        shape = added.get(key, {}).get("nd_reformulated_orig_global_shape")
        stored = tuple(getattr(opened.tensors.state_dict_metadata[key], "size", ()))
        if shape is None or len(stored) != len(shape) + 1:
            raise UnsupportedError(
                f"{key} of {opened.directory} has the shape {stored}, which is not that of a flattened tensor as "
                f"Megatron 0.12 writes it in the format {MODEL_SPACE}; {_WAY_OUT}"
            )
        return cls(key, tuple(shape), stored[:-1])

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of one block."""
        return tuple(size // count for size, count in zip(self.shape, self.grid))


@dataclass(frozen=True)
class _Run:
    """Elements of one block that are read together: whole rows of the block, from the first needed to the last.

    Attributes:
        index: Of the block in the grid.
        start: Of the run in the flattened block.
        shape: Of the run as whole rows.
        wanted: What of them is needed.
        target: Where that goes in the box.
    """

    index: tuple[int, ...]
    start: int
    shape: tuple[int, ...]
    wanted: tuple[slice, ...]
    target: tuple[slice, ...]


def runs(blocks: _Blocks, template: Template, held: HeldRows, local: torch.Tensor, *, key: str) -> Any:
    """The rows `held`, put together from runs of elements of the blocks. Reads whole rows of a block.

    Only to read, and not for Megatron 0.12. Arguments as of :func:`entry`.

    Raises:
        UnsupportedError: The tensor has another shape than the model expects.
    """
    found: list[tuple[_Run, torch.Tensor]] = []
    for box in boxes(template, held, local):
        _check_shape(blocks, box)
        axis = len(box.data.shape) - local.dim()
        if any(size != 1 for size in blocks.block[:axis]):
            raise UnsupportedError(f"{blocks.key} has blocks of the shape {blocks.block}; {_WAY_OUT}")
        if box.allow_shape_mismatch:
            box.data.zero_()  # rows that the checkpoint does not have, of a vocabulary that is padded further here
        found += [(run, box.data) for run in _runs_of(blocks, box.global_offset, tuple(box.data.shape), axis)]
    if not found:
        return LocalNonpersistentObject(local)
    replica_id = replica_id_of(template, held)

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [_described(blocks, run, key, box, replica_id) for run, box in found]

    return ShardedTensorFactory(key, local, build, _merger(found, local), replica_id)


def _runs_of(blocks: _Blocks, offset: Sequence[int], shape: Sequence[int], axis: int) -> Iterator[_Run]:
    """The runs that the box at `offset` consists of; `axis` is that of the rows."""
    end = [min(start + size, whole) for start, size, whole in zip(offset, shape, blocks.shape)]
    touched = [range(low // size, -(-high // size)) for low, high, size in zip(offset, end, blocks.block)]
    for index in itertools.product(*touched):
        origin = [number * size for number, size in zip(index, blocks.block)]
        low = [max(start, first) for start, first in zip(offset, origin)]
        high = [min(stop, first + size) for stop, first, size in zip(end, origin, blocks.block)]
        inner = math.prod(blocks.block[axis + 1 :])
        rows = slice(low[axis] - origin[axis], high[axis] - origin[axis])
        within = [slice(a - first, b - first) for a, b, first in zip(low, high, origin)]
        within[axis] = slice(0, rows.stop - rows.start)
        yield _Run(
            index,
            rows.start * inner,
            (*blocks.block[:axis], rows.stop - rows.start, *blocks.block[axis + 1 :]),
            tuple(within),
            tuple(slice(a - start, b - start) for a, b, start in zip(low, high, offset)),
        )


def _described(blocks: _Blocks, run: _Run, key: str, box: torch.Tensor, replica_id: Any) -> ShardedTensor:
    target = box[run.target]
    # Where rows are read whole they are read into place.
    direct = tuple(target.shape) == run.shape and target.is_contiguous()
    data = target if direct else torch.empty(run.shape, dtype=box.dtype, device=box.device)
    data = data.view((1,) * len(run.index) + (-1,))
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=(*blocks.grid, math.prod(blocks.block)),
        global_offset=(*run.index, run.start),
        axis_fragmentations=None,
        replica_id=replica_id,
        prepend_axis_num=0,
        allow_shape_mismatch=False,
    )


def _merger(found: list[tuple[_Run, torch.Tensor]], local: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    @torch.no_grad()
    def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
        for (run, box), values in zip(found, loaded, strict=True):
            target = box[run.target]
            if values.data_ptr() != target.data_ptr():  # else it was read into place
                target.copy_(values.reshape(run.shape)[run.wanted])
        return local

    return merge


def _check_shape(blocks: _Blocks, box: ShardedTensor) -> None:
    if box.allow_shape_mismatch or tuple(box.global_shape) == blocks.shape:
        return
    raise UnsupportedError(
        f"{blocks.key} has the shape {blocks.shape} in the checkpoint and {tuple(box.global_shape)} in this model; use "
        "the model arguments of the job that saved it."
    )


# ------------------------------------------------------------------------------------------------ names


def _key(opened: Opened, key: str, chain: str) -> str:
    """The name in the checkpoint: with expert parallelism Megatron puts the number of the optimizer before it.

    Raises:
        UnsupportedError: There is none that this job can ask for.
    """
    names = opened.tensors.state_dict_metadata
    if chain + key in names:
        return chain + key
    others = (name for name in names if name.startswith("chained_") and name.partition(".")[2] == key)
    found = key if key in names else next(others, None)
    if found is None:
        raise UnsupportedError(
            f"the checkpoint {opened.directory} has no {key}: it is not one of this model with Adam in the format "
            f"{MODEL_SPACE}; load weights alone with --no-load-optim."
        )
    if chain:
        raise UnsupportedError(
            f"{found} of the checkpoint {opened.directory} was saved without expert parallelism, of which this release "
            "of Megatron asks for other names; load it with --expert-model-parallel-size 1, or weights alone with "
            "--no-load-optim."
        )
    return found
