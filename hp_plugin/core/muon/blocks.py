"""Logical matrices inside parameters: what is orthogonalized as one matrix.

A parameter is often several matrices: a fused QKV weight is three, a stack of experts is one per expert. Muon's update
and its scale are those of each such matrix, so a parameter is read as a stack of matrices (`MatrixView`) out of which
blocks of rows and columns are cut (`Block`). Both are arithmetic on integers, the same on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hp_plugin.core.layout import Segment
from hp_plugin.errors import ConfigurationError, UnsupportedError

ViewKind = Literal["matrix", "stack", "convolution"]


@dataclass(frozen=True)
class MatrixView:
    """How a tensor of 2 or more dims is read as `depth` matrices of `rows` x `cols`.

    Attributes:
        kind: "matrix": (rows, cols). "stack": (depth, rows, cols), as experts are stored. "convolution": (rows, ...),
            all dims but the first flattened into the columns.
        depth: Number of matrices.
        rows: Rows of each: outputs of the layer.
        cols: Columns of each: inputs of the layer.
    """

    kind: ViewKind
    depth: int
    rows: int
    cols: int

    @classmethod
    def of(cls, shape: Sequence[int], kind: ViewKind | None = None) -> MatrixView:
        """The view of a tensor of global shape `shape`.

        Args:
            shape: Of the whole tensor.
            kind: How it is to be read. None: a matrix if it has 2 dims, a convolution if it has 4 or 5.

        Raises:
            ConfigurationError: The shape has not the dims of that kind.
            UnsupportedError: Three dims and no kind: a stack of experts and a 1-D convolution look alike.
        """
        shape = tuple(shape)
        if kind is None:
            if len(shape) == 3:
                raise UnsupportedError(
                    f"a parameter of shape {shape} may be a stack of matrices (experts) or a 1-D convolution; say "
                    "which with the split Stack() or Convolution(), or give it to AdamW"
                )
            kind = "matrix" if len(shape) == 2 else "convolution"
        fits = {"matrix": len(shape) == 2, "stack": len(shape) == 3, "convolution": len(shape) >= 3}[kind]
        if not fits:
            raise ConfigurationError(f"a parameter of shape {shape} cannot be read as a {kind}")
        if kind == "matrix":
            return cls(kind, 1, shape[0], shape[1])
        if kind == "stack":
            return cls(kind, shape[0], shape[1], shape[2])
        return cls(kind, 1, shape[0], math.prod(shape[1:]))


@dataclass(frozen=True)
class Block:
    """One logical matrix of a parameter.

    Attributes:
        name: What it is within the parameter: "" for all of it, "q", "expert3", "head1", ...
        layer: Index of the matrix of the view that it is cut out of.
        rows: Row indices, in the order of the block's rows. Ascending, disjoint, none empty.
        cols: Column indices, likewise.
        is_transposed: Whether rows are the layer's inputs and columns its outputs.
    """

    name: str
    layer: int
    rows: tuple[Segment, ...]
    cols: tuple[Segment, ...]
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n): rows and columns of the logical matrix."""
        return sum(s.length for s in self.rows), sum(s.length for s in self.cols)

    @property
    def outputs_and_inputs(self) -> tuple[int, int]:
        """What scale factors are of."""
        m, n = self.shape
        return (n, m) if self.is_transposed else (m, n)


Split = Callable[[MatrixView], Sequence[Block]]
"""A split descriptor: the blocks of a view. They must be disjoint and cover it: `check_blocks`."""


def whole(view: MatrixView) -> tuple[Block, ...]:
    """Every matrix of the view is one block."""
    rows, cols = (Segment(0, view.rows),), (Segment(0, view.cols),)
    if view.kind != "stack":
        return (Block("", 0, rows, cols),)
    return tuple(Block(f"expert{layer}", layer, rows, cols) for layer in range(view.depth))


def check_blocks(view: MatrixView, blocks: Sequence[Block], *, name: str) -> None:
    """Checks that blocks are disjoint and cover a view.

    Args:
        view: The view.
        blocks: Its blocks.
        name: Of the parameter, for the message.

    Raises:
        ConfigurationError: An index is outside, taken twice or not taken, or segments do not ascend.
    """
    covered = 0
    for block in blocks:
        for segments, size in ((block.rows, view.rows), (block.cols, view.cols)):
            end = 0
            for start, length in segments:
                if start < end or length < 1 or start + length > size:
                    raise ConfigurationError(
                        f"block {block.name!r} of parameter {name} takes the indices {list(segments)} of {size}: they "
                        "must ascend, lie inside and not be empty"
                    )
                end = start + length
        if not 0 <= block.layer < view.depth:
            raise ConfigurationError(f"block {block.name!r} of parameter {name} is cut out of matrix {block.layer}")
        covered += math.prod(block.shape)
    for layer in range(view.depth):
        _check_disjoint([block for block in blocks if block.layer == layer], name=name)
    if covered != view.depth * view.rows * view.cols:
        raise ConfigurationError(
            f"the blocks of parameter {name} cover {covered} of its {view.depth * view.rows * view.cols} elements: "
            f"they have the shapes {[block.shape for block in blocks]} in {view}"
        )


def _check_disjoint(blocks: Sequence[Block], *, name: str) -> None:
    """Raises ConfigurationError if two of the blocks of one matrix share an element."""
    for mine, other in (("rows", "cols"), ("cols", "rows")):
        if len({getattr(block, other) for block in blocks}) == 1:  # the usual case: sorting suffices
            taken = sorted((segment, block.name) for block in blocks for segment in getattr(block, mine))
            for (before, first), (after, second) in itertools.pairwise(taken):
                if after.start < before.start + before.length:
                    raise ConfigurationError(f"blocks {first!r} and {second!r} of parameter {name} overlap")
            return
    for index, block in enumerate(blocks):
        for earlier in blocks[:index]:
            if _meet(block.rows, earlier.rows) and _meet(block.cols, earlier.cols):
                raise ConfigurationError(f"blocks {earlier.name!r} and {block.name!r} of parameter {name} overlap")


def _meet(one: Sequence[Segment], other: Sequence[Segment]) -> bool:
    return any(a.start < b.start + b.length and b.start < a.start + a.length for a in one for b in other)
