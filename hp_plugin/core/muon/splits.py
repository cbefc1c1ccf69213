"""Split descriptors: into which logical matrices a fused parameter is cut.

A descriptor is a frozen value: comparable, hashable, printable, the same on every rank. Called with the `MatrixView`
of a parameter it gives that parameter's blocks. Its `kind` says how a tensor of 3 dims is to be read, which the shape
alone cannot tell; None leaves it to the shape.

Weights are read as torch stores them: rows are outputs, columns inputs. Where a checkpoint stores (inputs, outputs), as
GPT-2's `Conv1D` does, cut columns (`ColumnSplit`, `dim=1`) and say so (`Transposed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hp_plugin.core.layout import Segment
from hp_plugin.core.muon.blocks import Block, MatrixView, Split, ViewKind, check_blocks, whole
from hp_plugin.errors import ConfigurationError, HyperParallelError

_AXES = ("rows", "columns")


def blocks_of(name: str, shape: Sequence[int], split: Split | None = None) -> tuple[MatrixView, tuple[Block, ...]]:
    """Reads a parameter as matrices and cuts it.

    Args:
        name: Of the parameter, for messages.
        shape: Of the whole tensor.
        split: How it is cut. None: each matrix of it is one block.

    Returns:
        The view and its blocks, which are disjoint and cover it.

    Raises:
        ConfigurationError: The split does not fit the shape.
        UnsupportedError: A shape of 3 dims and a split that does not say what they are.
    """
    try:
        view = MatrixView.of(shape, getattr(split, "kind", None))
        blocks = tuple(whole(view) if split is None else split(view))
    except HyperParallelError as error:
        raise type(error)(f"parameter {name} of shape {tuple(shape)} cannot be split: {error}") from error
    check_blocks(view, blocks, name=name)
    return view, blocks


@dataclass(frozen=True)
class Whole:
    """Every matrix of the parameter is one block: what holds without a descriptor, said outright."""

    kind: ClassVar[ViewKind | None] = None

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        return whole(view)

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Interleaved:
    """`groups` equal groups of indices, each divided into the same parts: part i of all groups together is one block.

    `Interleaved(8, ("q", "k", "v"), (512, 128, 128))` cuts the rows q k v q k v ... of 8 query groups into three
    matrices of 4096, 1024 and 1024 rows.

    Attributes:
        groups: Number of groups.
        names: Of the parts, in the order in which a group stores them.
        sizes: Indices of each part within one group.
        dim: 0 cuts rows, 1 columns.
    """

    groups: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    kind: ClassVar[ViewKind | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _checked_names(self.names))
        object.__setattr__(self, "sizes", tuple(positive("a size", size) for size in self.sizes))
        positive("groups", self.groups)
        _checked_dim(self.dim)
        if len(self.sizes) != len(self.names):
            raise ConfigurationError(f"a split names {len(self.names)} parts {self.names}, but has sizes {self.sizes}.")

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        found, stride = _extent(view, self.dim), sum(self.sizes)
        if found != self.groups * stride:
            parts = " + ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))
            times = f"{self.groups} groups of " if self.groups > 1 else ""
            raise ConfigurationError(
                f"{times}{parts} = {self.groups * stride} {_AXES[self.dim]}, but the matrix has {found}. Give sizes "
                "that add up; gated attention has a fourth part, as large as the queries (gated=True)."
            )
        blocks, first = [], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            segments = [Segment(group * stride + first, size) for group in range(self.groups)]
            blocks += _cut(view, name, self.dim, segments)
            first += size
        return tuple(blocks)

    def __str__(self) -> str:
        parts = " ".join(f"{name}:{size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"{_AXES[self.dim]} {self.groups}x[{parts}]" if self.groups > 1 else f"{_AXES[self.dim]} {parts}"


@dataclass(frozen=True)
class RowSplit:
    """Consecutive ranges of rows, one block each: fused QKV as Hugging Face models store it, fused gate and up.

    Attributes:
        names: Of the blocks, in order.
        sizes: Rows of each. None: all of them have equally many.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    dim: ClassVar[int] = 0
    kind: ClassVar[ViewKind | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", _checked_names(self.names))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", Interleaved(1, self.names, self.sizes, self.dim).sizes)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        sizes = self.sizes
        if sizes is None:
            sizes = (_share(view, self.dim, len(self.names), "parts"),) * len(self.names)
        return Interleaved(1, self.names, sizes, self.dim)(view)

    def __str__(self) -> str:
        if self.sizes is None:
            return f"{_AXES[self.dim]} {' '.join(self.names)}, equal"
        return str(Interleaved(1, self.names, self.sizes, self.dim))


@dataclass(frozen=True)
class ColumnSplit(RowSplit):
    """`RowSplit` of columns, for weights stored as (inputs, outputs)."""

    dim: ClassVar[int] = 1


@dataclass(frozen=True)
class PerHead:
    """One block per attention head.

    Attributes:
        num_heads: Number of heads.
        dim: 0 for projections to heads (queries, keys, values), 1 for the output projection, whose columns are heads.
    """

    num_heads: int
    dim: int = 0
    kind: ClassVar[ViewKind | None] = None

    def __post_init__(self) -> None:
        positive("num_heads", self.num_heads)
        _checked_dim(self.dim)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        return _equal_blocks(view, self.dim, self.num_heads, "head")

    def __str__(self) -> str:
        return f"{self.num_heads} heads of {_AXES[self.dim]}"


@dataclass(frozen=True)
class GroupedRows:
    """Experts stored one below the other in a matrix of (num_experts * m, n): one block each, or what `inner` makes.

    Attributes:
        num_experts: Number of experts in the whole (global) tensor.
        inner: Split of one expert's matrix. Its blocks are called "expert3.gate".
        dim: 0 if experts follow one another in rows, 1 in columns.
    """

    num_experts: int
    inner: Split = Whole()
    dim: int = 0
    kind: ClassVar[ViewKind | None] = None

    def __post_init__(self) -> None:
        positive("num_experts", self.num_experts)
        _checked_dim(self.dim)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        experts = _equal_blocks(view, self.dim, self.num_experts, "expert")
        return tuple(block for expert in experts for block in _refined(expert, self.inner))

    def __str__(self) -> str:
        return f"{self.num_experts} experts of {_AXES[self.dim]}{_suffix(self.inner)}"


@dataclass(frozen=True)
class Stack:
    """A tensor of 3 dims (experts, rows, cols): one block per expert, or what `inner` makes of each.

    Attributes:
        inner: Split of one expert's matrix. Its blocks are called "expert3.gate".
    """

    inner: Split = Whole()
    kind: ClassVar[ViewKind | None] = "stack"

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        if view.kind != "stack":
            raise ConfigurationError(f"a stack of experts is read as a {view.kind}; its shape must have 3 dims.")
        return tuple(block for expert in whole(view) for block in _refined(expert, self.inner))

    def __str__(self) -> str:
        return f"stack{_suffix(self.inner)}"


@dataclass(frozen=True)
class Convolution:
    """A convolution's kernel (out, in / groups, ...) as one matrix of (out, everything else), or one per group.

    Attributes:
        groups: As of the module.
    """

    groups: int = 1
    kind: ClassVar[ViewKind | None] = "convolution"

    def __post_init__(self) -> None:
        positive("groups", self.groups)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        return whole(view) if self.groups == 1 else _equal_blocks(view, 0, self.groups, "group")

    def __str__(self) -> str:
        return f"convolution, {self.groups} groups" if self.groups > 1 else "convolution"


@dataclass(frozen=True)
class Transposed:
    """A weight stored as (inputs, outputs): cut by `inner`, scaled by outputs over inputs.

    Attributes:
        inner: How it is cut.
    """

    inner: Split = Whole()

    @property
    def kind(self) -> ViewKind | None:
        """That of the inner split."""
        return getattr(self.inner, "kind", None)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        return tuple(dataclasses.replace(block, is_transposed=True) for block in self.inner(view))

    def __str__(self) -> str:
        return f"(in, out), {self.inner}"


@dataclass(frozen=True)
class Nested:
    """Cuts blocks of `outer` further: the block "q" of a fused weight per head, say. Made by `nested`.

    Attributes:
        outer: First split.
        inner: (name of a block of `outer`, its split). The blocks are called "q.head0".
    """

    outer: Split
    inner: tuple[tuple[str, Split], ...]

    @property
    def kind(self) -> ViewKind | None:
        """That of the outer split."""
        return getattr(self.outer, "kind", None)

    def __call__(self, view: MatrixView) -> tuple[Block, ...]:
        """The blocks of `view`; ConfigurationError if it does not fit."""
        outer, splits = self.outer(view), dict(self.inner)
        missing = sorted(splits.keys() - {block.name for block in outer})
        if missing:
            raise ConfigurationError(f"{self.outer} has no blocks {missing}; it has {[b.name for b in outer]}.")
        return tuple(b for block in outer for b in _refined(block, splits.get(block.name, Whole())))

    def __str__(self) -> str:
        return f"{self.outer}; " + "; ".join(f"{name}: {split}" for name, split in self.inner)


def nested(outer: Split, **inner: Split) -> Nested:
    """Cuts the blocks of `outer` that `inner` names further: `nested(qkv(32, 8, 128), q=PerHead(32))`."""
    return Nested(outer, tuple(inner.items()))


# ------------------------------------------------------------------------------------------------------ arithmetic


def _extent(view: MatrixView, dim: int) -> int:
    return view.cols if dim else view.rows


def _share(view: MatrixView, dim: int, count: int, what: str) -> int:
    """Indices of each of `count` equal parts."""
    found = _extent(view, dim)
    if found % count or found == 0:
        raise ConfigurationError(f"{found} {_AXES[dim]} cannot be divided into {count} equal {what}.")
    return found // count


def _cut(view: MatrixView, name: str, dim: int, segments: Iterable[Segment]) -> list[Block]:
    """The block of those rows or columns of every matrix of the view."""
    taken, rest = _merged(segments), (Segment(0, _extent(view, 1 - dim)),)
    rows, cols = (rest, taken) if dim else (taken, rest)
    return [
        Block(f"expert{layer}.{name}" if view.kind == "stack" else name, layer, rows, cols)
        for layer in range(view.depth)
    ]


def _equal_blocks(view: MatrixView, dim: int, count: int, what: str) -> tuple[Block, ...]:
    size = _share(view, dim, count, f"{what}s")
    blocks = [_cut(view, f"{what}{index}", dim, [Segment(index * size, size)]) for index in range(count)]
    return tuple(block for parts in blocks for block in parts)


def _refined(block: Block, split: Split) -> list[Block]:
    """What `split` makes of a block, in the indices of the matrix that the block is cut out of."""
    rows, cols = block.shape
    return [
        Block(
            f"{block.name}.{part.name}" if part.name else block.name,
            block.layer,
            _selected(block.rows, part.rows),
            _selected(block.cols, part.cols),
            block.is_transposed or part.is_transposed,
        )
        for part in split(MatrixView("matrix", 1, rows, cols))
    ]


def _selected(segments: Sequence[Segment], relative: Sequence[Segment]) -> tuple[Segment, ...]:
    """Of the indices that `segments` list, those at the positions `relative`."""
    found = []
    for start, length in relative:
        position = 0
        for outer_start, outer_length in segments:
            low, high = max(start, position), min(start + length, position + outer_length)
            if low < high:
                found.append(Segment(outer_start + low - position, high - low))
            position += outer_length
    return _merged(found)


def _merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Joins neighbours that touch."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].start + merged[-1].length == segment.start:
            merged[-1] = Segment(merged[-1].start, merged[-1].length + segment.length)
        else:
            merged.append(segment)
    return tuple(merged)


def _suffix(inner: Split) -> str:
    return "" if inner == Whole() else f", each {inner}"


def positive(what: str, value: int) -> int:
    """`value`, if it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{what} of a split must be a positive integer, but is {value!r}.")
    return value


def _checked_dim(dim: int) -> None:
    if dim not in (0, 1):
        raise ConfigurationError(f"dim of a split must be 0 (rows) or 1 (columns), but is {dim!r}.")


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not names or len(set(names)) != len(names) or not all(names):
        raise ConfigurationError(f"the names of a split's parts must be different and not empty, but are {names!r}.")
    return tuple(names)
