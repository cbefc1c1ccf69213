"""Messages of Muon's exchange: which pieces of which matrices, one after another, and who had a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hp_plugin.core.muon.blocks import MatrixView
from hp_plugin.core.muon.communicator import Communicator
from hp_plugin.core.muon.distribution import Piece, Run
from hp_plugin.core.transport import Pending


class Item(NamedTuple):
    """Part of a message: a piece of a block.

    Attributes:
        block: Index in the wave.
        piece: Where it lies in the block.
    """

    block: int
    piece: Piece


@dataclass(frozen=True)
class Leg:
    """One direction of a wave, as this rank sees it.

    Attributes:
        communicator: The ranks that take part.
        gathers: Whether every rank gets everything (an all-gather), and uses what it needs.
        sends: For each position, what this rank sends there; where it gathers, the same to all.
        receives: For each position, what comes from there.
    """

    communicator: Communicator
    gathers: bool
    sends: list[list[Item]]
    receives: list[list[Item]]


def _count(items: Sequence[Item]) -> int:
    return sum(item.piece.numel + 1 for item in items)


class LegInFlight:
    """A leg whose collective has been issued.

    Args:
        leg: The leg.
        dtype: Of the message.
        device: Of the message.
        values_of: The values of an item to be sent, [rows, cols] in any dtype, and its flag.
    """

    def __init__(
        self,
        leg: Leg,
        dtype: torch.dtype,
        device: torch.device,
        values_of: Callable[[Item], tuple[Tensor, bool]],
    ) -> None:
        self._leg = leg
        sends = leg.sends[:1] if leg.gathers else leg.sends
        self._counts = [_count(items) for items in leg.receives]
        self._stride = max([*self._counts, *map(_count, sends)], default=0) if leg.gathers else 0
        size = self._stride if leg.gathers else sum(map(_count, sends))
        source = torch.empty(size, dtype=dtype, device=device)
        end = 0
        for items in sends:
            end = _pack(source, end, items, values_of)
        communicator = leg.communicator
        self._pending: Pending
        if leg.gathers:
            self._output = torch.empty(self._stride * len(communicator.ranks), dtype=dtype, device=device)
            self._pending = communicator.all_gather(self._output, source)
        else:
            self._output = torch.empty(sum(self._counts), dtype=dtype, device=device)
            counts = (self._counts, [_count(items) for items in sends])
            self._pending = communicator.all_to_all(self._output, source, counts)

    def finish(self, use: Callable[[Item, Tensor, bool], None]) -> None:
        """Waits, and hands every item received to `use(item, values [rows, cols], flag)`."""
        self._pending.wait()
        starts = [position * self._stride for position in range(len(self._counts))]
        if not self._leg.gathers:
            starts = [end - count for end, count in zip(itertools.accumulate(self._counts), self._counts)]
        segments = list(zip(starts, self._counts, self._leg.receives, strict=True))
        # All flags at once: on a device each look at a value waits for everything before it.
        flags = [self._output.narrow(0, start + count - len(items), len(items)) for start, count, items in segments]
        has_gradient = iter(torch.cat(flags).tolist())
        for start, _, items in segments:
            for item in items:
                values = self._output.narrow(0, start, item.piece.numel).view(item.piece.shape)
                use(item, values, bool(next(has_gradient)))
                start += item.piece.numel


def _pack(target: Tensor, start: int, items: Sequence[Item], values_of: Callable[[Item], tuple[Tensor, bool]]) -> int:
    """Writes the values of all items and then their flags; returns the end."""
    flags = []
    for item in items:
        values, flag = values_of(item)
        target.narrow(0, start, item.piece.numel).view(item.piece.shape).copy_(values)
        start += item.piece.numel
        flags.append(float(flag))
    if flags:
        target.narrow(0, start, len(flags)).copy_(torch.tensor(flags))
    return start + len(flags)


# ---- pieces of tensors -----------------------------------------------------------------------------------------------


def as_layers(local: Tensor, view: MatrixView) -> Tensor:
    """A local tensor as (layers, rows, cols), sharing its memory."""
    if view.kind == "stack":
        return local
    if view.kind == "matrix":
        return local.unsqueeze(0)
    return local.view(1, local.shape[0], local[0].numel() if local.shape[0] else 0)


def read_runs(matrix: Tensor, rows: Sequence[Run], cols: Sequence[Run], *, local: bool) -> Tensor:
    """The rows and columns of `runs` out of a matrix; a view where there is one run of each.

    Args:
        matrix: (rows, cols): the local view, or the block.
        rows: Runs of rows.
        cols: Runs of columns.
        local: Whether the matrix is indexed as the local tensor is (else as the block is).
    """
    for dim, runs in enumerate((rows, cols)):
        if len(runs) == 1:
            start, length = (runs[0].local if local else runs[0].block), runs[0].length
            if length != matrix.shape[dim]:
                matrix = matrix.narrow(dim, start, length)
        else:
            matrix = matrix.index_select(dim, run_indices(runs, local=local, device=matrix.device))
    return matrix


def write_runs(matrix: Tensor, rows: Sequence[Run], cols: Sequence[Run], values: Tensor, *, local: bool) -> None:
    """Writes what `read_runs` reads."""
    if len(rows) == 1 and len(cols) == 1:
        read_runs(matrix, rows, cols, local=local).copy_(values)
        return
    row_indices = run_indices(rows, local=local, device=matrix.device)
    col_indices = run_indices(cols, local=local, device=matrix.device)
    matrix[row_indices[:, None], col_indices] = values.to(matrix.dtype)


def run_indices(runs: Sequence[Run], *, local: bool, device: torch.device) -> Tensor:
    """The indices of all runs, 1-D int64."""
    starts = [run.local if local else run.block for run in runs]
    return torch.cat([torch.arange(start, start + run.length) for start, run in zip(starts, runs)]).to(device)
