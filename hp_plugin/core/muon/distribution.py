"""Which ranks hold which part of a parameter, and the parts of its logical matrices that each of them holds.

Everything here is arithmetic on a `Layout`: no communication, the same on every rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hp_plugin.core.layout import AttachedLayout, Layout, Segment, attached_layout, is_shard
from hp_plugin.core.muon.blocks import Block, MatrixView
from hp_plugin.errors import ConfigurationError, UnsupportedError

_PLAN = "plan_"
"""In front of the names of a sharding plan's axes, which may be called as data-parallel ones are."""


@dataclass(frozen=True)
class Distribution:
    """The layout of a parameter together with the ranks of its mesh.

    Attributes:
        layout: What the rank at each mesh coordinate holds.
        ranks: The global rank at each coordinate, in the order of `layout.coordinates()`.
    """

    layout: Layout
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.num_ranks or len(set(self.ranks)) != len(self.ranks):
            raise ConfigurationError(
                f"a layout over {self.layout.num_ranks} ranks needs as many different ranks, but got {self.ranks}"
            )
        if self.layout.partial_axes:
            raise ConfigurationError(
                f"a parameter of shape {self.layout.global_shape} is Partial along {self.layout.partial_axes}: its "
                "values are not yet reduced. Redistribute it to Replicate or Shard before the optimizer sees it"
            )

    @classmethod
    def on_mesh(cls, layout: Layout, mesh: DeviceMesh) -> Distribution:
        """The ranks are those of `mesh`, whose shape must be `layout.axis_sizes`. No communication."""
        if tuple(mesh.shape) != layout.axis_sizes:
            raise ConfigurationError(f"a layout over axes of {layout.axis_sizes} is on a mesh of {tuple(mesh.shape)}")
        return cls(layout, tuple(mesh.mesh.flatten().tolist()))

    @classmethod
    def of(cls, parameter: torch.Tensor, *, process_group: dist.ProcessGroup | None = None) -> Distribution | None:
        """The distribution of a `DTensor`; of a plain tensor, that of replicas over `process_group`, else None.

        Where a sharding plan has laid the parameter out, the axes of the plan come first and those others after them.
        """
        found = None
        if isinstance(parameter, DTensor):
            found = cls.on_mesh(Layout.from_dtensor(parameter), parameter.device_mesh)
        elif process_group is not None:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            found = cls(Layout(tuple(parameter.shape), ("replicas",), (len(ranks),), (Replicate(),)), ranks)
        attached = attached_layout(parameter)
        if attached is None or attached.ranks is None:
            return found
        if found is None:
            found = cls(Layout(tuple(parameter.shape), (), (), ()), (dist.get_rank(),))
        return cls._under_plan(found, attached, *attached.ranks)

    @classmethod
    def _under_plan(
        cls, inner: Distribution, attached: AttachedLayout, mesh: torch.Tensor, places: tuple[int, ...]
    ) -> Distribution | None:
        """The distribution of a whole tensor of which `inner` distributes one piece.

        Args:
            inner: Of the piece, over ranks that have one coordinate on the plan's axes that divide the tensor.
            attached: How the plan divides it.
            mesh: The global ranks of the whole mesh.
            places: The index in `mesh` of each axis of the plan.
        """
        axes = []
        for axis, (place, placement) in enumerate(zip(places, attached.layout.placements, strict=True)):
            line = set(dist.get_process_group_ranks(attached.groups[axis]))
            is_apart = attached.groups[axis] in attached.apart
            if not is_apart and len(line) > 1 and (is_shard(placement) or not line <= set(inner.ranks)):
                axes.append((axis, place))
        sizes = tuple(attached.layout.axis_sizes[axis] for axis, _ in axes)
        ranks = []
        for coordinate in itertools.product(*(range(size) for size in sizes)):
            for rank in inner.ranks:
                index = (mesh == rank).nonzero()[0].tolist()
                for (_, place), value in zip(axes, coordinate, strict=True):
                    index[place] = value
                ranks.append(int(mesh[tuple(index)]))
        if len(ranks) == 1:
            return None
        layout = Layout(
            attached.layout.global_shape,
            (*(f"{_PLAN}{attached.layout.axis_names[axis]}" for axis, _ in axes), *inner.layout.axis_names),
            (*sizes, *inner.layout.axis_sizes),
            (*(attached.layout.placements[axis] for axis, _ in axes), *inner.layout.placements),
            shard_order=(*range(len(axes)), *(len(axes) + axis for axis in inner.layout.shard_order)),
        )
        return cls(layout, tuple(ranks))

    @property
    def plan_replicas(self) -> tuple[str, ...]:
        """Axes of a sharding plan on which every rank has the parameter whole."""
        return tuple(name[len(_PLAN) :] for name in self.layout.replicate_axes if name.startswith(_PLAN))

    def check_shard(self, name: str, rank: int, shape: Sequence[int]) -> None:
        """Checks that the local tensor of a rank, of shape `shape`, is what the layout says of it.

        Raises:
            ConfigurationError: It is not, or the rank has no part in the parameter `name`.
        """
        if rank not in self.ranks:
            raise ConfigurationError(
                f"parameter {name} is distributed over the ranks {self.ranks}, of which rank {rank} is none: give it "
                "to the optimizers of those ranks only"
            )
        coordinate = next(itertools.islice(self.layout.coordinates(), self.ranks.index(rank), None))
        expected = self.layout.local_shape(coordinate)
        if tuple(shape) != expected:
            raise ConfigurationError(
                f"parameter {name} of global shape {self.layout.global_shape} has the local shape {tuple(shape)} on "
                f"rank {rank}, where its layout says {expected}: give the layout of this tensor, without padding"
            )

    @functools.cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica: those that together hold the parameter once, in the order of their shards."""
        layout = self.layout
        axes = [layout.axis_names.index(name) for name in layout.shard_axes]
        replicas: dict[tuple[int, ...], list[int]] = {}
        for coordinate, rank in zip(layout.coordinates(), self.ranks, strict=True):
            key = tuple(index for axis, index in enumerate(coordinate) if axis not in axes)
            replicas.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in replicas.values())

    @functools.cached_property
    def shard_coordinates(self) -> tuple[tuple[int, ...], ...]:
        """A mesh coordinate of each shard, in the order of each replica in `shards`."""
        layout = self.layout
        sizes = [
            size if name in layout.shard_axes else 1
            for name, size in zip(layout.axis_names, layout.axis_sizes, strict=True)
        ]
        return tuple(itertools.product(*(range(size) for size in sizes)))


class Run(NamedTuple):
    """Consecutive rows (or columns) that a rank holds of a block.

    Attributes:
        local: First index in the local tensor.
        block: First index in the block.
        length: How many.
    """

    local: int
    block: int
    length: int


@dataclass(frozen=True)
class Piece:
    """What one shard holds of one block: `rows` times `cols` of one matrix of the local view.

    Attributes:
        layer: Index of that matrix in the local view.
        rows: Runs of rows, in local order.
        cols: Runs of columns, in local order.
    """

    layer: int
    rows: tuple[Run, ...]
    cols: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return sum(run.length for run in self.rows), sum(run.length for run in self.cols)

    @property
    def numel(self) -> int:
        """Elements."""
        rows, cols = self.shape
        return rows * cols


def pieces_of(distribution: Distribution | None, view: MatrixView, block: Block) -> tuple[Piece | None, ...]:
    """What each shard holds of a block, None where it holds nothing, in the order of `Distribution.shard_coordinates`.

    Args:
        distribution: Of the parameter; None if this rank holds all of it and knows of no other.
        view: How the parameter is read.
        block: One of its blocks.
    """
    if distribution is None:
        return (_piece(_whole_view(view), block),)
    segments = (_view_segments(distribution.layout, view, each) for each in distribution.shard_coordinates)
    return tuple(_piece(each, block) for each in segments)


ViewSegments = tuple[tuple[Segment, ...], tuple[Segment, ...], tuple[Segment, ...]]
"""Indices of the layers, rows and columns of a view that a rank holds, each in local order."""


def _whole_view(view: MatrixView) -> ViewSegments:
    return (Segment(0, view.depth),), (Segment(0, view.rows),), (Segment(0, view.cols),)


@functools.lru_cache(maxsize=4096)
def _view_segments(layout: Layout, view: MatrixView, coordinate: tuple[int, ...]) -> ViewSegments:
    if view.kind == "matrix":
        return (Segment(0, 1),), layout.local_segments(coordinate, 0), layout.local_segments(coordinate, 1)
    if view.kind == "stack":
        layers, rows, cols = (layout.local_segments(coordinate, dim) for dim in range(3))
        return layers, rows, cols
    if any(dim > 1 for dim in layout.shard_dims):
        raise UnsupportedError(
            f"a convolution weight of shape {layout.global_shape} is sharded along dim {max(layout.shard_dims)}; Muon "
            "reads it as a matrix of dim 0 by all others and supports shards of dims 0 and 1"
        )
    per_input = view.cols // layout.global_shape[1]
    inputs = layout.local_segments(coordinate, 1)
    cols = tuple(Segment(start * per_input, length * per_input) for start, length in inputs)
    return (Segment(0, 1),), layout.local_segments(coordinate, 0), cols


def _piece(segments: ViewSegments, block: Block) -> Piece | None:
    layers, rows, cols = segments
    layer = _position(layers, block.layer)
    if layer is None:
        return None
    row_runs, col_runs = _runs(rows, block.rows), _runs(cols, block.cols)
    return Piece(layer, row_runs, col_runs) if row_runs and col_runs else None


def _position(segments: Sequence[Segment], index: int) -> int | None:
    position = 0
    for start, length in segments:
        if start <= index < start + length:
            return position + index - start
        position += length
    return None


def _runs(local: Sequence[Segment], block: Sequence[Segment]) -> tuple[Run, ...]:
    """Where the indices of `local` and `block` meet; neighbours that continue one another are joined."""
    found: list[Run] = []
    local_start = 0
    for low, length in local:
        block_start = 0
        for start, size in block:
            first, last = max(low, start), min(low + length, start + size)
            if first < last:
                run = Run(local_start + first - low, block_start + first - start, last - first)
                before = found[-1] if found else None
                if before and before.local + before.length == run.local and before.block + before.length == run.block:
                    found[-1] = Run(before.local, before.block, before.length + run.length)
                else:
                    found.append(run)
            block_start += size
        local_start += length
    return tuple(found)
