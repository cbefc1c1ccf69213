"""One wave on one rank: its pieces go to the owners, matrices are orthogonalized, updates come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hp_plugin.core.muon.communicator import Communicator, Communicators
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Piece, Run
from hp_plugin.core.muon.messages import Item, Leg, LegInFlight, read_runs, write_runs
from hp_plugin.core.muon.plan import PlannedBlock, Wave


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
        replica = tuple(sorted(wave.shards[self.replica]))
        self.back: Leg | None = None
        self.across: Leg | None = None
        if wave.has_two_stages:
            self.back = self._make_back(communicators.over(replica)) if wave.goes_out else None
            self.across = self._make_across(communicators)
        elif wave.comes_back:
            self.back = self._make_back(communicators.over(wave.ranks))
        self._matrices: dict[tuple[int, int], Tensor] = {}
        self._members: dict[tuple[int, int], list[int]] = {}
        self._place: dict[int, tuple[tuple[int, int], int]] = {}
        for index in self.owned:
            shape = self._shape_of(wave.blocks[index])
            members = self._members.setdefault(shape, [])
            self._place[index] = (shape, len(members))
            members.append(index)
        self._has_gradient: dict[int, bool] = {}
        self._came_back: dict[int, tuple[Tensor, bool]] = {}
        self._leg: LegInFlight | None = None

    # What a subclass may do otherwise: what lies in messages, and what the owner makes of it.

    def _shape_of(self, block: PlannedBlock) -> tuple[int, int]:
        """Of what the owner collects of a block."""
        return block.block.shape

    def _message_piece(self, block: PlannedBlock, piece: Piece) -> Piece:
        """What travels for a shard's piece of a block, either way."""
        return piece

    def _local_values(self, index: int, piece: Piece, contribute: Contribute) -> tuple[Tensor, bool]:
        """What this rank brings of a block for its piece, and whether it had a gradient."""
        values, has_gradient = contribute(self.wave.blocks[index].parameter)
        return read_runs(values[piece.layer], piece.rows, piece.cols, local=True), has_gradient

    def _collect(self, index: int, piece: Piece, values: Tensor) -> None:
        """Takes what a shard brings into what the owner collects."""
        write_runs(self._matrix(index), piece.rows, piece.cols, values, local=False)

    def _solve(self, stack: Tensor) -> Tensor:
        """From what has been collected of blocks of one shape to what goes back."""
        return self.wave.newton_schulz(stack)

    def _update(self, index: int, piece: Piece, solution: Tensor) -> Tensor:
        """This rank's piece of the orthogonalized block, from what came back for that piece."""
        return solution

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def _items(self, shard: int, owners: Sequence[int]) -> list[Item]:
        """What travels between a shard and any of these owners."""
        found = []
        for index, block in enumerate(self.wave.blocks):
            piece = block.pieces[shard]
            if piece is not None and block.owner in owners:
                found.append(Item(index, self._message_piece(block, piece)))
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

    def _make_back(self, communicator: Communicator) -> Leg:
        sends, receives = [], []
        gathers = self.wave.mode == "gather"
        for peer in communicator.ranks:
            shard = self.wave.places[peer][1]
            if gathers:
                sends.append([Item(i, whole_piece(self.wave.blocks[i].block.shape)) for i in self.owned])
                blocks = enumerate(self.wave.blocks)
                receives.append([Item(i, whole_piece(b.block.shape)) for i, b in blocks if b.owner == peer])
            else:
                sends.append(self._items(shard, [self.rank] if peer != self.rank else []))
                receives.append(self._items(self.shard, [peer] if peer != self.rank else []))
        return Leg(communicator, gathers, sends, receives)

    def _make_across(self, communicators: Communicators) -> Leg:
        column = {replica[self.shard]: replica for replica in self.wave.shards}
        communicator = communicators.over(tuple(sorted(column)))
        mine = self._items(self.shard, column[self.rank])
        return Leg(
            communicator,
            False,
            [mine if peer != self.rank else [] for peer in communicator.ranks],
            [self._items(self.shard, column[peer]) if peer != self.rank else [] for peer in communicator.ranks],
        )

    @property
    def legs(self) -> list[Leg]:
        """Those that exist, each of which is one collective."""
        return [leg for leg in (self.out, self.back, self.across) if leg is not None]

    # ---- the three parts of a step ----------------------------------------------------------------------------------

    def start(self, contribute: Contribute) -> None:
        """Sends this rank's pieces to their owners and places those of its own matrices."""
        blocks = self.wave.blocks
        dtype = self.wave.newton_schulz.dtype
        self._matrices = {
            shape: torch.empty((len(members), *shape), dtype=dtype, device=self.device)
            for shape, members in self._members.items()
        }
        self._has_gradient = dict.fromkeys(self.owned, False)

        def values_of(item: Item) -> tuple[Tensor, bool]:
            piece = blocks[item.block].pieces[self.shard]
            assert piece is not None
            return self._local_values(item.block, piece, contribute)

        if self.out is not None:
            self._leg = LegInFlight(self.out, dtype, self.device, values_of)
        for index in self.owned:
            piece = blocks[index].pieces[self.shard]
            if piece is not None:
                values, self._has_gradient[index] = self._local_values(index, piece, contribute)
                self._collect(index, piece, values)

    def _matrix(self, index: int) -> Tensor:
        shape, position = self._place[index]
        return self._matrices[shape][position]

    def orthogonalize(self, counters: MuonCounters) -> None:
        """Waits for the pieces of this rank's matrices, orthogonalizes them and sends the updates."""
        if self._leg is not None:
            leg, self._leg = self._leg, None
            leg.finish(self._receive_piece)
        for shape, members in self._members.items():
            live = [i for i, index in enumerate(members) if self._has_gradient[index]]
            stack = self._matrices[shape]
            if len(live) == len(members):
                self._matrices[shape] = self._solve(stack)
            elif live:
                self._matrices[shape] = stack.clone()
                self._matrices[shape][live] = self._solve(stack[live])
            counters.newton_schulz_calls += len(live)
            counters.flops += sum(self.wave.blocks[members[i]].flops for i in live)
        if self.back is not None:
            self._leg = LegInFlight(self.back, self.wave.newton_schulz.dtype, self.device, self._updated_values)

    def _receive_piece(self, item: Item, values: Tensor, flag: bool) -> None:
        block = self.wave.blocks[item.block]
        if block.owner != self.rank:
            return
        self._collect(item.block, item.piece, values)
        self._has_gradient[item.block] = self._has_gradient[item.block] or flag

    def _updated_values(self, item: Item) -> tuple[Tensor, bool]:
        piece = item.piece
        values = read_runs(self._matrix(item.block), piece.rows, piece.cols, local=False)
        return values, self._has_gradient[item.block]

    def finish(self, apply: Apply) -> None:
        """Applies the updates of this rank's pieces of all matrices."""
        blocks = self.wave.blocks
        for index in self.owned:
            piece = blocks[index].pieces[self.shard]
            if piece is not None:
                item = Item(index, self._message_piece(blocks[index], piece))
                self._came_back[index] = values, has_gradient = self._updated_values(item)
                if has_gradient:
                    apply(blocks[index], piece, self._update(index, piece, values))

        def use(item: Item, values: Tensor, flag: bool) -> None:
            self._receive_update(item, values, flag, apply)

        if self._leg is not None:
            leg, self._leg = self._leg, None
            leg.finish(use)
        if self.across is not None:
            dtype = self.wave.newton_schulz.dtype
            LegInFlight(self.across, dtype, self.device, lambda item: self._came_back[item.block]).finish(use)
        self._matrices, self._has_gradient, self._came_back = {}, {}, {}

    def _receive_update(self, item: Item, values: Tensor, flag: bool, apply: Apply) -> None:
        block = self.wave.blocks[item.block]
        self._came_back[item.block] = values, flag
        piece = block.pieces[self.shard]
        if block.owner == self.rank or piece is None or not flag:
            return
        if self.wave.mode == "gather":  # the whole block came
            values = read_runs(values, piece.rows, piece.cols, local=False)
        apply(block, piece, self._update(item.block, piece, values))


def whole_piece(shape: tuple[int, int]) -> Piece:
    """All of a matrix."""
    rows, cols = shape
    return Piece(0, (Run(0, 0, rows),), (Run(0, 0, cols),))
