"""The full tensors of a unit: how they come to hold the parameters of all ranks, and what becomes of them after.

There are two kinds. Gathered ones, here, exist while the unit is unsharded: a collective fills them. Shared ones, in
`shared.py`, lie in memory that all ranks of the shard group map: there is one copy, and it stays.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.core.fsdp.kept import KeptParts
from hp_plugin.core.fsdp.operand import Operand
from hp_plugin.core.fsdp.parameter import MeshInfo
from hp_plugin.core.transport import C10dTransport, Pending

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root


class FullTensors(abc.ABC):
    """The full tensors of one unit. The order of calls is begin, wait, install, release; release may come early."""

    def take_in_shards(self, root: Root) -> None:  # noqa: B027  # most have nothing to do
        """Called before a gather for a forward: shards may have been replaced by others."""

    @abc.abstractmethod
    def begin(self, root: Root, *, for_backward: bool) -> bool:
        """Starts to fill them. Every rank of the shard group must call, in the same order.

        Args:
            root: Of the unit.
            for_backward: Whether they are wanted for the backward of a forward that has filled them before.

        Returns:
            Whether ranks communicate for it.
        """

    @abc.abstractmethod
    def wait(self, root: Root) -> None:
        """Waits until they are filled. Idempotent; nothing where nothing was begun."""

    @abc.abstractmethod
    def install(self, root: Root, *, is_last_use: bool) -> None:
        """Puts the full parameters into the modules.

        Args:
            root: Of the unit.
            is_last_use: Whether no other forward waits for its backward.
        """

    @abc.abstractmethod
    def release(self, root: Root, *, keep: int | None) -> None:
        """Puts the shards back into the modules and gives up the full tensors. Keeps their `.grad`.

        Args:
            root: Of the unit.
            keep: Over how many ranks they are to stay sharded for a backward; None: nothing is to be kept.
        """

    @abc.abstractmethod
    def drop_kept(self) -> None:
        """Frees what was kept for a backward."""


class GatheredFulls(FullTensors):
    """Full tensors that a collective fills.

    Args:
        operands: The parameters of the unit as operands of its collectives.
        info: The mesh.
        transport: Collectives of the shard group; None where it has one rank.
    """

    def __init__(
        self,
        operands: Sequence[Operand],
        info: MeshInfo,
        transport: C10dTransport | None,
    ) -> None:
        self._operands = operands
        self._info = info
        self._transport = transport
        self._gather: Pending | None = None
        self._gathers_kept = False
        self._prepared = Counters()
        """What the thread that prepares a gather counts. Whoever waits for the gather adds it to the root's."""
        self._kept: KeptParts | None = None

    def begin(self, root: Root, *, for_backward: bool) -> bool:
        """As `FullTensors.begin`: issues the all-gather."""
        # What forward kept is of the weights of that forward: good for its backward and for nothing else.
        self._gathers_kept = self._kept is not None and self._kept.is_held and for_backward
        if self._transport is None:
            self._begin_gather()
            return False
        if not self._operands:
            return False
        # No more than one unit beside the one that computes: its gradients under reduction, or full tensors gathered
        # ahead.
        after = root.pipeline.intra_in_flight
        if self._kept is not None and self._gathers_kept:
            self._gather = self._kept.transport.all_gather(self._kept.begin_gather, after=after)
        else:
            self._gather = self._transport.all_gather(self._begin_gather, after=after)
        return True

    def _begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        gathered = [operand.begin_gather(self._prepared) for operand in self._operands]
        return [g[0] for g in gathered if g is not None], [g[1] for g in gathered if g is not None]

    def wait(self, root: Root) -> None:
        """As `FullTensors.wait`."""
        if self._gather is not None:
            counters = root.counters
            start = counters.start_wait()
            self._gather.wait()
            counters.all_gathers += 1
            counters.all_gather_bytes += self._gather.operand_bytes
            counters.copied_bytes += self._gather.copied_bytes
            self._gather = None
            counters.waited(WaitCause.ALL_GATHER, start)
        if self._prepared.copied_bytes:
            root.counters.copied_bytes += self._prepared.copied_bytes
            self._prepared.copied_bytes = 0

    def install(self, root: Root, *, is_last_use: bool) -> None:
        """As `FullTensors.install`."""
        if self._gathers_kept:
            for operand in self._operands:
                operand.finish_refill()
            if is_last_use:
                self.drop_kept()
        else:
            for operand in self._operands:
                operand.finish_gather(root.counters)

    def release(self, root: Root, *, keep: int | None) -> None:
        """As `FullTensors.release`: frees them."""
        if keep is not None:
            if self._kept is None or self._kept.transport.group.size() != keep:
                self._kept = KeptParts(self._operands, root.small_transport(self._info, keep))
            self._kept.keep(root.counters)
        for operand in self._operands:
            operand.release_full()

    def drop_kept(self) -> None:
        """As `FullTensors.drop_kept`."""
        if self._kept is not None:
            self._kept.drop()
