"""Where the parts of a Megatron weight are: tensor parallelism and data parallelism as one layout.

Megatron cuts a weight over tensor-parallel ranks first; HyperFSDP then shards each part over data-parallel ranks. Muon
needs the whole matrix, so both cuts are described together: `Layout` of the whole weight over the axes of the
data-parallel mesh and one axis `tp`, whose shards are applied first.

A fused gate and up projection is cut in a special way: each tensor-parallel rank holds a part of the gate and then the
same part of the up projection (Megatron's `partition_stride` of 2, which releases before 0.16 do not set).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.distribution import Distribution

TP_AXIS = "tp"


@dataclass(frozen=True)
class TensorParallelCut:
    """How tensor parallelism cuts a weight.

    Attributes:
        size: Tensor-parallel ranks.
        dim: The dim that is cut; None where every rank holds all of it.
        pieces: Consecutive pieces of the dim that are cut each by itself: 2 for gate and up.
    """

    size: int
    dim: int | None
    pieces: int = 1

    @classmethod
    def of(cls, parameter: torch.Tensor, size: int, *, pieces: int | None = None) -> TensorParallelCut:
        """What Megatron's marks on a parameter say.

        Args:
            parameter: With `tensor_model_parallel`, `partition_dim` and `partition_stride`, if it is cut.
            size: Tensor-parallel ranks of its layer.
            pieces: Instead of `partition_stride`.
        """
        dim = int(getattr(parameter, "partition_dim", -1))
        if size == 1 or dim < 0 or not getattr(parameter, "tensor_model_parallel", False):
            return cls(size, None)
        stride = int(getattr(parameter, "partition_stride", 1))
        return cls(size, dim, stride if pieces is None else pieces)

    @property
    def placement(self) -> Placement:
        """Of the axis `tp`."""
        if self.dim is None:
            return Replicate()
        return Shard(self.dim) if self.pieces == 1 else _StridedShard(self.dim, split_factor=self.pieces)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole weight, from that of a rank's part."""
        return tuple(size * (self.size if dim == self.dim else 1) for dim, size in enumerate(shape))


@dataclass(frozen=True)
class RankGrid:
    """The global ranks that hold parts or copies of a weight.

    Attributes:
        ranks: Of each tensor-parallel rank, those of its data-parallel mesh in the order of the mesh.
        axis_names: Of the data-parallel mesh.
        axis_sizes: Of it.
    """

    ranks: tuple[tuple[int, ...], ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    @classmethod
    def gather(
        cls, ranks: Sequence[int], names: Sequence[str], sizes: Sequence[int], tp_group: dist.ProcessGroup | None
    ) -> RankGrid:
        """Learn the meshes of the other tensor-parallel ranks. Every rank of `tp_group` must call.

        Args:
            ranks: Of this rank's data-parallel mesh, in the order of the mesh.
            names: Of the axes of the mesh.
            sizes: Of them.
            tp_group: The tensor-parallel group; None for one rank.
        """
        meshes: list[Any] = [tuple(ranks)]
        if tp_group is not None and tp_group.size() > 1:
            meshes = [None] * tp_group.size()
            dist.all_gather_object(meshes, tuple(ranks), group=tp_group)
        return cls(tuple(meshes), tuple(names), tuple(sizes))


def distribution_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    cut: TensorParallelCut,
    grid: RankGrid,
    *,
    own: int | None = None,
) -> Distribution:
    """The distribution of the matrix to be orthogonalized, over tensor- and data-parallel ranks. No communication.

    Args:
        shape: Of the part of the weight that a tensor-parallel rank has, before data parallelism shards it.
        placements: Of that part on the data-parallel mesh of the grid.
        cut: By tensor parallelism.
        grid: The ranks.
        own: Index of the tensor-parallel rank whose part is a matrix by itself; None for the matrix of all of them.
    """
    if own is not None:
        return Distribution(Layout(tuple(shape), grid.axis_names, grid.axis_sizes, tuple(placements)), grid.ranks[own])
    axes = len(placements)
    layout = Layout(
        cut.whole_shape(shape),
        (*grid.axis_names, TP_AXIS),
        (*grid.axis_sizes, len(grid.ranks)),
        (*placements, cut.placement),
        shard_order=(axes, *range(axes)),  # tensor parallelism cuts first
    )
    # The last axis runs fastest.
    return Distribution(layout, tuple(rank for column in zip(*grid.ranks, strict=True) for rank in column))
