"""Runs a plan: brings matrices to their owners, has them orthogonalized, and brings the updates back.

Waves are pipelined. While the matrices of wave k are orthogonalized, the pieces of wave k + 1 are on their way to their
owners and the updates of wave k - 1 on their way back. Every rank issues the same collectives in the same order
whatever gradients it has: a piece travels with a flag that says whether its rank had a gradient, and a matrix for which
no rank had one is neither orthogonalized nor updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hp_plugin.core.muon.communicator import Communicator, Communicators
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Piece, Run
from hp_plugin.core.muon.plan import ExchangePlan, PlannedBlock, Wave
from hp_plugin.core.transport import Pending


class Contribution(NamedTuple):
    """What this rank brings of a parameter.

    Attributes:
        values: Its shard of what is to be orthogonalized, (layers, rows, cols), floating point.
        has_gradient: Whether this rank had a gradient for it.
    """

    values: Tensor
    has_gradient: bool


Contribute = Callable[[int], Contribution]
"""The contribution to a parameter, by its index in the plan."""

Apply = Callable[[PlannedBlock, Piece, Tensor], None]
"""Uses this rank's piece of an orthogonalized block: (block, piece, values [rows, cols] in the dtype of the wave)."""


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

    def finish(self, use: Callable[[Item, Tensor, Tensor], None]) -> None:
        """Waits, and hands every item received to `use(item, values [rows, cols], flag 0-dim)`."""
        self._pending.wait()
        start = 0
        for position, items in enumerate(self._leg.receives):
            if self._leg.gathers:
                start = position * self._stride
            flag = start + self._counts[position] - len(items)
            for item in items:
                values = self._output.narrow(0, start, item.piece.numel).view(item.piece.shape)
                use(item, values, self._output[flag])
                start, flag = start + item.piece.numel, flag + 1
            start += len(items)


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


# ---- waves -----------------------------------------------------------------------------------------------------------


class WaveRunner:
    """One wave on this rank: which items it sends and receives, decided once.

    Args:
        wave: The wave.
        rank: This rank.
        communicators: Where groups come from. Every rank of the domain must construct, in the same order.
        device: Where messages are made.
    """

    def __init__(self, wave: Wave, rank: int, communicators: Communicators, device: torch.device) -> None:
        self.wave, self.rank, self.device = wave, rank, device
        self.replica, self.shard = wave.places[rank]
        self.owned = [index for index, block in enumerate(wave.blocks) if block.owner == rank]
        self.out = self._make_out(communicators) if wave.goes_out else None
        self.back = self._make_back(communicators) if wave.comes_back else None
        self._matrices: dict[tuple[int, int], Tensor] = {}
        self._place: dict[int, tuple[tuple[int, int], int]] = {}
        for index in self.owned:
            shape = wave.blocks[index].block.shape
            members = [i for i in self.owned if wave.blocks[i].block.shape == shape]
            self._place[index] = (shape, members.index(index))
        self._has_gradient: dict[int, bool | Tensor] = {}
        self._leg: LegInFlight | None = None

    def _items(self, shard: int, owners: Sequence[int], *, whole: bool = False) -> list[Item]:
        """What travels between a shard and any of these owners."""
        found = []
        for index, block in enumerate(self.wave.blocks):
            piece = block.pieces[shard]
            if piece is not None and block.owner in owners:
                found.append(Item(index, _whole_piece(block) if whole else piece))
        return found

    def _make_out(self, communicators: Communicators) -> Leg:
        replica = self.wave.shards[self.replica]
        communicator = communicators.over(tuple(sorted(replica)))
        shard_of = {rank: shard for shard, rank in enumerate(replica)}
        sends, receives = [], []
        gathers = self.wave.mode == "gather"
        for peer in communicator.ranks:
            if gathers:
                sends.append(self._items(self.shard, [r for r in replica if r != self.rank]))
                receives.append(self._items(shard_of[peer], [r for r in replica if r != peer]))
            else:
                sends.append(self._items(self.shard, [peer] if peer != self.rank else []))
                receives.append(self._items(shard_of[peer], [self.rank] if peer != self.rank else []))
        return Leg(communicator, gathers, sends, receives)

    def _make_back(self, communicators: Communicators) -> Leg:
        communicator = communicators.over(self.wave.ranks)
        sends, receives = [], []
        gathers = self.wave.mode == "gather"
        for peer in communicator.ranks:
            shard = self.wave.places[peer][1]
            if gathers:
                sends.append([Item(i, _whole_piece(self.wave.blocks[i])) for i in self.owned])
                receives.append([Item(i, _whole_piece(b)) for i, b in enumerate(self.wave.blocks) if b.owner == peer])
            else:
                sends.append(self._items(shard, [self.rank] if peer != self.rank else []))
                receives.append(self._items(self.shard, [peer] if peer != self.rank else []))
        return Leg(communicator, gathers, sends, receives)

    @property
    def legs(self) -> list[Leg]:
        """Those that exist, each of which is one collective."""
        return [leg for leg in (self.out, self.back) if leg is not None]

    # ---- the three parts of a step ----------------------------------------------------------------------------------

    def start(self, contribute: Contribute) -> None:
        """Sends this rank's pieces to their owners and places those of its own matrices."""
        blocks = self.wave.blocks
        shapes: dict[tuple[int, int], int] = {}
        for index in self.owned:
            shapes[blocks[index].block.shape] = shapes.get(blocks[index].block.shape, 0) + 1
        dtype = self.wave.newton_schulz.dtype
        self._matrices = {
            shape: torch.empty((count, *shape), dtype=dtype, device=self.device) for shape, count in shapes.items()
        }
        self._has_gradient = dict.fromkeys(self.owned, False)
        if self.out is not None:
            self._leg = LegInFlight(self.out, dtype, self.device, lambda item: self._local_values(item, contribute))
        for index in self.owned:
            piece = blocks[index].pieces[self.shard]
            if piece is not None:
                values, self._has_gradient[index] = self._local_values(Item(index, piece), contribute)
                write_runs(self._matrix(index), piece.rows, piece.cols, values, local=False)

    def _local_values(self, item: Item, contribute: Contribute) -> tuple[Tensor, bool]:
        piece = item.piece
        values, has_gradient = contribute(self.wave.blocks[item.block].parameter)
        return read_runs(values[piece.layer], piece.rows, piece.cols, local=True), has_gradient

    def _matrix(self, index: int) -> Tensor:
        shape, position = self._place[index]
        return self._matrices[shape][position]

    def orthogonalize(self, counters: MuonCounters) -> None:
        """Waits for the pieces of this rank's matrices, orthogonalizes them and sends the updates."""
        if self._leg is not None:
            leg, self._leg = self._leg, None
            leg.finish(self._receive_piece)
        newton_schulz = self.wave.newton_schulz
        for shape in list(self._matrices):
            members = [index for index in self.owned if self._place[index][0] == shape]
            live = [i for i, index in enumerate(members) if bool(self._has_gradient[index])]
            stack = self._matrices[shape]
            if len(live) == len(members):
                self._matrices[shape] = newton_schulz(stack)
            elif live:
                self._matrices[shape] = stack.clone()
                self._matrices[shape][live] = newton_schulz(stack[live])
            counters.newton_schulz_calls += len(live)
            counters.flops += len(live) * newton_schulz.flops(*shape)
        if self.back is not None:
            self._leg = LegInFlight(self.back, newton_schulz.dtype, self.device, self._updated_values)

    def _receive_piece(self, item: Item, values: Tensor, flag: Tensor) -> None:
        block = self.wave.blocks[item.block]
        if block.owner != self.rank:
            return
        write_runs(self._matrix(item.block), item.piece.rows, item.piece.cols, values, local=False)
        self._has_gradient[item.block] = bool(self._has_gradient[item.block]) or bool(flag)

    def _updated_values(self, item: Item) -> tuple[Tensor, bool]:
        piece = item.piece
        values = read_runs(self._matrix(item.block), piece.rows, piece.cols, local=False)
        return values, bool(self._has_gradient[item.block])

    def finish(self, apply: Apply) -> None:
        """Applies the updates of this rank's pieces of all matrices."""
        blocks = self.wave.blocks
        for index in self.owned:
            piece = blocks[index].pieces[self.shard]
            if piece is not None and bool(self._has_gradient[index]):
                apply(blocks[index], piece, read_runs(self._matrix(index), piece.rows, piece.cols, local=False))
        if self._leg is not None:
            leg, self._leg = self._leg, None
            leg.finish(lambda item, values, flag: self._receive_update(item, values, flag, apply))
        self._matrices, self._has_gradient = {}, {}

    def _receive_update(self, item: Item, values: Tensor, flag: Tensor, apply: Apply) -> None:
        block = self.wave.blocks[item.block]
        piece = block.pieces[self.shard]
        if block.owner == self.rank or piece is None or not bool(flag):
            return
        if item.piece is not piece:  # the whole block, gathered
            values = read_runs(values, piece.rows, piece.cols, local=False)
        apply(block, piece, values)


def _whole_piece(block: PlannedBlock) -> Piece:
    rows, cols = block.block.shape
    return Piece(0, (Run(0, 0, rows),), (Run(0, 0, cols),))


class Exchanger:
    """Runs the waves of a plan.

    Args:
        plan: The plan. Every rank of each of its domains must construct, in the same order.
        communicators: Where groups come from.
        device: Where messages are made.
    """

    def __init__(self, plan: ExchangePlan, communicators: Communicators, device: torch.device) -> None:
        self.plan = plan
        self._runners = [WaveRunner(wave, communicators.rank, communicators, device) for wave in plan.waves]

    def run(self, contribute: Contribute, apply: Apply, counters: MuonCounters) -> None:
        """One step. Every rank of every domain must call.

        Args:
            contribute: Called once for each parameter, no later than in its last wave; not for those that another
                replica owns alone (`MatrixParameter.in_one_replica`), unless this rank has something to send.
            apply: Called for each piece of this rank once its update is there.
            counters: Where work and messages are counted.
        """
        uses = self._uses()
        kept: dict[int, Contribution] = {}

        def contribution(parameter: int) -> Contribution:
            if parameter not in kept:
                kept[parameter] = contribute(parameter)
            return kept[parameter]

        def start(number: int) -> None:
            self._runners[number].start(contribution)
            for parameter in uses[number]:
                if not self.plan.parameters[parameter].in_one_replica:
                    contribution(parameter)  # its momentum goes on, although other replicas own its matrices
                kept.pop(parameter, None)

        for number, runner in enumerate(self._runners):
            if number == 0:
                start(0)
            if number + 1 < len(self._runners):
                start(number + 1)
            runner.orthogonalize(counters)
            if number > 0:
                self._runners[number - 1].finish(apply)
            counters.count(runner.legs, runner.rank, runner.wave)
        if self._runners:
            self._runners[-1].finish(apply)

    def _uses(self) -> list[list[int]]:
        """For each wave, the parameters of which no later wave has a block."""
        last = {block.parameter: n for n, wave in enumerate(self.plan.waves) for block in wave.blocks}
        uses: list[list[int]] = [[] for _ in self.plan.waves]
        for parameter, number in last.items():
            uses[number].append(parameter)
        return uses
