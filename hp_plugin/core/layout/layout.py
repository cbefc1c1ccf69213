"""`Layout`: which part of a tensor the rank at a mesh coordinate holds.

A layout is arithmetic on integers. It needs no process group, no device and no tensor, so a plan for 768 ranks can be
computed on a laptop and compared on every rank.

How one tensor dim is divided: start with the whole dim as one segment of indices. Visit the mesh axes in
`shard_order`. An axis whose placement is `Shard(dim)` cuts the indices that are left as `torch.chunk` does: every
piece has `ceil(size / n)` indices, the last non-empty one what remains, later ones none. `_StridedShard(dim,
split_factor=k)` cuts into `k` pieces first, each of them into `n`, and rank `i` takes the `i`-th part of every piece:
the result of FSDP on a tensor that tensor parallelism has already cut into `k`. What is left is a short list of
segments, contiguous unless a strided shard took part.

`DTensor` always works from left to right and needs `_StridedShard` to describe another order. That is exact only when
dims divide evenly. `shard_order` says the order outright, so it is exact for uneven dims too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.errors import ConfigurationError, UnsupportedError

Coordinate = Sequence[int]


class Segment(NamedTuple):
    """Consecutive indices `start, ..., start + length - 1` of one tensor dim."""

    start: int
    length: int


def is_shard(placement: Placement) -> bool:
    """True for `Shard` and for `_StridedShard`, which is a subclass of `Shard` in some torch versions only."""
    return isinstance(placement, (Shard, _StridedShard))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds, as a plain tensor that shares its memory.

    Args:
        tensor: a `DTensor` (also as an `nn.Parameter`) or a plain tensor.

    Returns:
        `tensor._local_tensor` of a `DTensor`, else `tensor` itself. No DTensor operation is dispatched and autograd
        does not see the access: `DTensor.to_local()` would do both, and gives a new `Parameter` object on every call.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@dataclass(frozen=True)
class Layout:
    """How a tensor of `global_shape` is divided over a mesh. Frozen, hashable, comparable; holds no process group.

    Attributes:
        global_shape: shape of the whole tensor.
        axis_names: one name per mesh axis, e.g. `("dp_replicate", "dp_shard")`.
        axis_sizes: number of ranks along each mesh axis; 1 is allowed everywhere.
        placements: one torch placement per mesh axis. Negative dims of shards are normalised.
        shard_order: indices of the mesh axes in the order in which their shards are applied. Empty (the default)
            means from left to right, as `DTensor` does. Stored in a canonical form: only the order among axes that
            divide the same tensor dim matters.

    A coordinate is one index per mesh axis, in the order of `axis_names`: what `DeviceMesh.get_coordinate()` returns.
    """

    global_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; this is where inputs become canonical
        set_field(self, "global_shape", tuple(int(size) for size in self.global_shape))
        set_field(self, "axis_names", tuple(self.axis_names))
        set_field(self, "axis_sizes", tuple(int(size) for size in self.axis_sizes))
        set_field(self, "placements", tuple(_normalised(p, len(self.global_shape)) for p in self.placements))
        set_field(self, "shard_order", tuple(self.shard_order) or tuple(range(len(self.axis_names))))
        self._check()
        set_field(self, "shard_order", _canonical_order(self.shard_order, self.placements))

    def _check(self) -> None:
        num_axes = len(self.axis_names)
        if not num_axes == len(self.axis_sizes) == len(self.placements):
            raise ConfigurationError(
                f"a layout needs one size and one placement for each mesh axis, but there are {num_axes} axis names, "
                f"{len(self.axis_sizes)} sizes and {len(self.placements)} placements."
            )
        if len(set(self.axis_names)) != num_axes:
            raise ConfigurationError(f"mesh axis names must differ from each other, but are {self.axis_names}.")
        if any(size < 1 for size in self.axis_sizes):
            raise ConfigurationError(f"every mesh axis needs at least one rank, but the sizes are {self.axis_sizes}.")
        if any(size < 0 for size in self.global_shape):
            raise ConfigurationError(f"a tensor shape cannot be negative, but is {self.global_shape}.")
        if sorted(self.shard_order) != list(range(num_axes)):
            raise ConfigurationError(
                f"shard_order must name each of the {num_axes} mesh axes once by its index, but is {self.shard_order}."
            )

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_mesh(cls, global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
        """The layout of a tensor of `global_shape` on `mesh`. No communication; any rank may call it alone."""
        names = mesh.mesh_dim_names or tuple(f"axis_{index}" for index in range(mesh.ndim))
        return cls(tuple(global_shape), tuple(names), tuple(mesh.shape), tuple(placements))

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> Layout:
        """The layout of a `DTensor`. No communication; any rank may call it alone."""
        layout = cls.from_mesh(tensor.shape, tensor.device_mesh, tensor.placements)
        return dataclasses.replace(layout, shard_order=_explicit_shard_order(tensor))

    # ---------------------------------------------------------------- axes

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.axis_sizes)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that divide the tensor, in mesh order, axes of size 1 included."""
        return tuple(name for name, p in zip(self.axis_names, self.placements, strict=True) if is_shard(p))

    @property
    def replicate_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes along which every rank holds the same values, in mesh order."""
        return tuple(name for name, p in zip(self.axis_names, self.placements, strict=True) if isinstance(p, Replicate))

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes along which the values still have to be reduced, in mesh order."""
        return tuple(name for name, p in zip(self.axis_names, self.placements, strict=True) if isinstance(p, Partial))

    @property
    def shard_dims(self) -> tuple[int, ...]:
        """Tensor dims that some mesh axis divides, ascending."""
        return tuple(sorted({_dim(p) for p in self.placements if is_shard(p)}))

    def num_shards(self, dim: int) -> int:
        """Into how many pieces, empty ones included, tensor dim `dim` is divided."""
        dim = self._tensor_dim(dim)
        return math.prod(
            n for n, p in zip(self.axis_sizes, self.placements, strict=True) if is_shard(p) and _dim(p) == dim
        )

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """All mesh coordinates, in the order of the mesh's ranks (the last axis runs fastest)."""
        return itertools.product(*(range(size) for size in self.axis_sizes))

    # ---------------------------------------------------------------- what one rank holds

    def local_segments(self, coordinate: Coordinate, dim: int) -> tuple[Segment, ...]:
        """The indices of tensor dim `dim` that the rank at `coordinate` holds, in its local order.

        Returns:
            Non-empty segments. None at all where the local shard is empty; one unless a strided shard took part.
        """
        dim = self._tensor_dim(dim)
        self._check_coordinate(coordinate)
        segments: tuple[Segment, ...] = (Segment(0, self.global_shape[dim]),)
        for axis in self.shard_order:
            placement = self.placements[axis]
            if is_shard(placement) and _dim(placement) == dim:
                segments = _cut(segments, placement, self.axis_sizes[axis], coordinate[axis])
        return _merged(segments)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Shape of the local tensor of the rank at `coordinate`, without padding."""
        return tuple(
            sum(segment.length for segment in self.local_segments(coordinate, dim))
            for dim in range(len(self.global_shape))
        )

    def local_numel(self, coordinate: Coordinate) -> int:
        """Number of elements that the rank at `coordinate` holds."""
        return math.prod(self.local_shape(coordinate))

    def local_offset(self, coordinate: Coordinate) -> tuple[int, ...]:
        """For each tensor dim, the global index of the first element of the rank at `coordinate`.

        An empty local shard has the offset `global_shape[dim]`, as in torch. Where `is_contiguous(coordinate)` is
        False the offset is that of the first segment only; use `local_segments` for all of them.
        """
        segments = (self.local_segments(coordinate, dim) for dim in range(len(self.global_shape)))
        return tuple(s[0].start if s else size for s, size in zip(segments, self.global_shape, strict=True))

    def is_contiguous(self, coordinate: Coordinate) -> bool:
        """True if offset and shape describe all that the rank at `coordinate` holds: one segment (or none) per dim."""
        return all(len(self.local_segments(coordinate, dim)) <= 1 for dim in range(len(self.global_shape)))

    # ---------------------------------------------------------------- evenness

    @property
    def max_local_shape(self) -> tuple[int, ...]:
        """For each tensor dim, the most indices that any rank holds: the shape of a buffer that fits every rank."""
        return tuple(self._max_local_size(dim) for dim in range(len(self.global_shape)))

    @property
    def is_even(self) -> bool:
        """True if every rank holds a local tensor of the same shape."""
        return all(self.num_padding_rows(dim) == 0 for dim in self.shard_dims)

    def num_padding_rows(self, dim: int = 0) -> int:
        """How many indices of tensor dim `dim` are added when every piece is padded to the largest one.

        With `Shard(0)` over n ranks this is `n * ceil(rows / n) - rows`, at most n - 1 when no piece is empty.
        """
        dim = self._tensor_dim(dim)
        return self.num_shards(dim) * self._max_local_size(dim) - self.global_shape[dim]

    def _max_local_size(self, dim: int) -> int:
        # Only the axes that divide this dim matter: a plan over thousands of ranks asks this for every parameter.
        divides = [is_shard(p) and _dim(p) == dim for p in self.placements]
        indices = (range(size) if taken else range(1) for size, taken in zip(self.axis_sizes, divides, strict=True))
        return max(sum(s.length for s in self.local_segments(c, dim)) for c in itertools.product(*indices))

    # ---------------------------------------------------------------- checks

    def _tensor_dim(self, dim: int) -> int:
        return _tensor_dim(dim, len(self.global_shape))

    def _check_coordinate(self, coordinate: Coordinate) -> None:
        fits = len(coordinate) == len(self.axis_sizes)
        if not fits or any(not 0 <= index < size for index, size in zip(coordinate, self.axis_sizes, strict=True)):
            raise ConfigurationError(
                f"coordinate {tuple(coordinate)} is not on a mesh of shape {self.axis_sizes} with axes "
                f"{self.axis_names}; give one index per axis, each from 0 to the axis size minus 1."
            )


def _dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]  # only called for shards


def _tensor_dim(dim: int, num_dims: int) -> int:
    if not -num_dims <= dim < num_dims:
        raise ConfigurationError(f"tensor dim {dim} does not exist on a tensor with {num_dims} dims.")
    return dim % num_dims


def _normalised(placement: Placement, num_dims: int) -> Placement:
    """`placement` with a non-negative dim; refuses what is not a torch placement or shards a missing dim."""
    if isinstance(placement, (Replicate, Partial)):
        return placement
    if not is_shard(placement):
        raise UnsupportedError(
            f"placement {placement!r} is not known to Layout; use Shard, Replicate or Partial of torch.distributed."
        )
    dim = _tensor_dim(_dim(placement), num_dims)
    if dim == _dim(placement):
        return placement
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _canonical_order(order: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """The order closest to left-to-right that applies the shards of each tensor dim as `order` does."""
    canonical = list(range(len(order)))
    for dim in {_dim(p) for p in placements if is_shard(p)}:
        axes = [axis for axis in order if is_shard(placements[axis]) and _dim(placements[axis]) == dim]
        for position, axis in zip(sorted(axes), axes, strict=True):
            canonical[position] = axis
    return tuple(canonical)


def _explicit_shard_order(tensor: DTensor) -> tuple[int, ...]:
    """The axis order that a DTensor's spec states beside its placements (recent torch only); empty if none.

    Where `_StridedShard` takes part, the placements themselves tell the order.
    """
    spec = tensor._spec
    entries = getattr(spec, "shard_order", None)
    if not entries or any(isinstance(p, _StridedShard) for p in spec.placements):
        return ()
    stated = [axis for entry in entries for axis in entry.mesh_dims]
    return tuple(stated + [axis for axis in range(len(spec.placements)) if axis not in stated])


def _cut(segments: tuple[Segment, ...], placement: Placement, num_chunks: int, index: int) -> tuple[Segment, ...]:
    """The part of `segments` that rank `index` of `num_chunks` takes under a `Shard` or `_StridedShard`."""
    if not isinstance(placement, _StridedShard):
        return _chunk(segments, num_chunks, index)
    split_factor = int(placement.split_factor)
    pieces = (_chunk(segments, split_factor, piece) for piece in range(split_factor))
    return tuple(segment for piece in pieces for segment in _chunk(piece, num_chunks, index))


def _chunk(segments: tuple[Segment, ...], num_chunks: int, index: int) -> tuple[Segment, ...]:
    """Chunk `index` of the concatenation of `segments`, by the rule of `torch.chunk` (later chunks may be empty)."""
    size = sum(segment.length for segment in segments)
    chunk_size = -(-size // num_chunks)
    first, last = chunk_size * index, min(chunk_size * (index + 1), size)
    found = []
    position = 0  # of the segment's first index within the concatenation
    for start, length in segments:
        low, high = max(first, position), min(last, position + length)
        if low < high:
            found.append(Segment(start + low - position, high - low))
        position += length
    return tuple(found)


def _merged(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Joins neighbours that touch and drops empty segments."""
    merged: list[Segment] = []
    for segment in segments:
        if segment.length == 0:
            continue
        if merged and merged[-1].start + merged[-1].length == segment.start:
            merged[-1] = Segment(merged[-1].start, merged[-1].length + segment.length)
        else:
            merged.append(segment)
    return tuple(merged)
