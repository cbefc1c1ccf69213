"""Orthogonalizing very skinny matrices without moving them.

Newton-Schulz of X (m x n, m < n) is Q X, where Q is a polynomial of the Gram matrix X X^T. Where n is sharded, each
shard has a summand of X X^T and a part of X. So the shards send summands of m x m to the owner, it adds them up and
computes Q, and each multiplies its part with the Q that comes back: 2 m^2 elements travel for a shard instead of its
2 m n / F. In float32, where the Gram form needs no second look at X.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_plugin.core.muon.distribution import Piece
from hp_plugin.core.muon.plan import PlannedBlock
from hp_plugin.core.muon.waves import Apply, Contribute, WaveRunner, whole_piece


class GramRunner(WaveRunner):
    """A wave of blocks of which every shard holds all of the short dim."""

    def _shape_of(self, block: PlannedBlock) -> tuple[int, int]:
        short = min(block.block.shape)
        return short, short

    def _message_piece(self, block: PlannedBlock, piece: Piece) -> Piece:
        return whole_piece(self._shape_of(block))

    def start(self, contribute: Contribute) -> None:
        """As `WaveRunner.start`. Every replica keeps its part of X until Q is there."""
        self._parts: dict[int, tuple[Tensor, bool]] = {}
        self._begun: set[int] = set()
        for index, block in enumerate(self.wave.blocks):
            piece = block.pieces[self.shard]
            if piece is not None:
                values, has_gradient = super()._local_values(index, piece, contribute)
                wide = values if self._is_wide(block) else values.mT
                self._parts[index] = wide.to(torch.float32, copy=True), has_gradient
        super().start(contribute)

    @staticmethod
    def _is_wide(block: PlannedBlock) -> bool:
        rows, cols = block.block.shape
        return rows <= cols

    def _local_values(self, index: int, piece: Piece, contribute: Contribute) -> tuple[Tensor, bool]:
        part, has_gradient = self._parts[index]
        return part @ part.mT, has_gradient

    def _collect(self, index: int, piece: Piece, values: Tensor) -> None:
        if index in self._begun:
            self._matrix(index).add_(values)
        else:
            self._begun.add(index)
            self._matrix(index).copy_(values)

    def _solve(self, stack: Tensor) -> Tensor:
        return self.wave.newton_schulz.gram_factor(stack)

    def finish(self, apply: Apply) -> None:
        """As `WaveRunner.finish`."""
        super().finish(apply)
        self._parts, self._begun = {}, set()

    def _update(self, index: int, piece: Piece, solution: Tensor) -> Tensor:
        part, _ = self._parts[index]
        update = solution @ part
        return update if self._is_wide(self.wave.blocks[index]) else update.mT
