"""The ranks among which matrices travel: a process group, or anything else with the same few operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.transport import Pending


class Communicator(Protocol):
    """Collectives over a fixed tuple of ranks. Every one of them must call, in the same order.

    Attributes:
        ranks: Global ranks; positions below are indices of it.
        position: Of this rank.
    """

    ranks: tuple[int, ...]
    position: int

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, counts: tuple[list[int], list[int]]) -> Pending:
        """Sends a segment of `source` to every rank and receives one from each.

        Args:
            output: 1-D; the segments received, in the order of positions.
            source: 1-D; the segments to be sent, in the order of positions.
            counts: Elements of the segments of `output`, and of those of `source`.
        """

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending:
        """Gathers 1-D tensors of the same size from all ranks into `output`, in the order of positions."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of positions. For set-up, not for steps."""


class Communicators(Protocol):
    """Makes communicators."""

    @property
    def rank(self) -> int:
        """This process's global rank."""

    def over(self, ranks: tuple[int, ...]) -> Communicator:
        """The communicator of `ranks` (ascending). Every one of them must call, in the same order."""


class GroupCommunicator:
    """A communicator over a process group.

    Args:
        group: The group; this rank is in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.position = dist.get_rank(group)

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, counts: tuple[list[int], list[int]]) -> Pending:
        """See `Communicator`."""
        work = dist.all_to_all_single(output, source, counts[0], counts[1], group=self._group, async_op=True)
        return Pending([work], [output, source])

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending:
        """See `Communicator`."""
        return Pending(
            [dist.all_gather_into_tensor(output, source, group=self._group, async_op=True)], [output, source]
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Communicator`."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._group)
        return values


class GroupCommunicators:
    """Finds a process group for a set of ranks: the world, one of those given, else a new one.

    A new group is made by its members alone, so ranks that hold other parameters need not take part.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    def know(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Adds groups that may be used."""
        for group in groups:
            self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    def know_mesh(self, mesh: DeviceMesh) -> None:
        """Adds the groups of the axes of a mesh."""
        self.know(mesh.get_group(axis) for axis in range(mesh.ndim))

    def over(self, ranks: tuple[int, ...]) -> Communicator:
        """See `Communicators`."""
        if ranks not in self._communicators:
            group = self._groups.get(ranks)
            if group is None and ranks == tuple(range(dist.get_world_size())):
                group = dist.group.WORLD
            if group is None:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert group is not None
            self._groups[ranks] = group
            self._communicators[ranks] = GroupCommunicator(group)
        return self._communicators[ranks]


def share_from(communicator: Communicator, rank: int, tensor: torch.Tensor) -> None:
    """Gives all ranks the values that one of them has. Every rank of the communicator must call.

    Args:
        communicator: The ranks.
        rank: Global rank of the one that has the values.
        tensor: Contiguous, of one size and dtype on all ranks; overwritten on the others.
    """
    counts = [0] * len(communicator.ranks)
    sends, receives = list(counts), list(counts)
    if communicator.ranks[communicator.position] == rank:
        sends = [tensor.numel() * (each != rank) for each in communicator.ranks]
    else:
        receives[communicator.ranks.index(rank)] = tensor.numel()
    source = tensor.reshape(-1).repeat(sum(map(bool, sends)))
    output = torch.empty(sum(receives), dtype=tensor.dtype, device=tensor.device)
    communicator.all_to_all(output, source, (receives, sends)).wait()
    if output.numel():
        tensor.copy_(output.view(tensor.shape))
