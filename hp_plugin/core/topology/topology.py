"""`Topology`: which global ranks share a supernode, i.e. reach one another over the fast links."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from hp_plugin.core.devices.domains import read_rank_table
from hp_plugin.core.topology.detection import conclude, look_around
from hp_plugin.core.topology.launchers import nodes_of_slurm, nodes_of_torchrun
from hp_plugin.errors import ConfigurationError


@dataclass(frozen=True)
class Topology:
    """A partition of the global ranks into supernodes. Frozen and hashable; holds no process group.

    Attributes:
        supernode_of: supernode index of each global rank. Indices are dense: 0, 1, ... in order of the lowest rank.
        source: one sentence on how this was found, for people.
    """

    supernode_of: tuple[int, ...]
    source: str = "given as a map"

    def __post_init__(self) -> None:
        if not self.supernode_of:
            raise ConfigurationError("a topology needs at least one rank, but the map is empty.")
        if self.supernode_of != _dense(self.supernode_of):
            raise ConfigurationError(
                f"supernode indices must be 0, 1, ... in order of their lowest rank, but are {self.supernode_of}; "
                "Topology.from_map accepts any labels."
            )

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_supernode_size(cls, world_size: int, size: int) -> Topology:
        """Supernodes of `size` consecutive ranks each.

        Raises:
            ConfigurationError: `size` does not divide `world_size`.
        """
        if size < 1 or world_size % size:
            raise ConfigurationError(
                f"a supernode size of {size} does not divide the {world_size} ranks of this job; choose one of "
                f"{_divisors(world_size)}, or give one supernode label per rank for supernodes of unequal size."
            )
        return cls(tuple(rank // size for rank in range(world_size)), f"an explicit supernode size of {size}")

    @classmethod
    def from_map(cls, labels: Sequence[int]) -> Topology:
        """One label per global rank; ranks with equal labels share a supernode. Sizes may differ.

        The ranks of a supernode need not be consecutive.
        """
        return cls(_dense(labels), "an explicit map of ranks to supernodes")

    @classmethod
    def from_hostnames(cls, hostnames: Sequence[str]) -> Topology:
        """One host name per global rank; ranks of one host share a supernode."""
        return cls(_dense(hostnames), f"host names ({len(set(hostnames))} different)")

    @classmethod
    def from_rank_table(cls, path: str | os.PathLike[str]) -> Topology:
        """The super pods of an Ascend rank table; its servers where it names no super pod.

        Raises:
            ConfigurationError: See `hp_plugin.core.devices.domains.read_rank_table`.
        """
        table = read_rank_table(path)
        return cls(_dense(table.domains), table.source)

    @classmethod
    def from_torchrun(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """The nodes of a job of torchrun with as many processes on each, from its variables; no communication.

        Raises:
            ConfigurationError: Variables are missing, or nodes have different numbers of processes.
        """
        return cls(_dense(nodes_of_torchrun(environment)), "the variables of torchrun")

    @classmethod
    def from_slurm(cls, environment: Mapping[str, str] = os.environ) -> Topology:
        """The nodes of a Slurm step whose tasks are laid out node by node, from its variables; no communication.

        Raises:
            ConfigurationError: Variables are missing, contradict one another, or tasks are laid out in another way.
        """
        return cls(_dense(nodes_of_slurm(environment)), "the variables of Slurm")

    @classmethod
    def detect(
        cls, supernode_size: int | Literal["auto"] | Sequence[int] = "auto", *, group: dist.ProcessGroup | None = None
    ) -> Topology:
        """The topology of the running job.

        Args:
            supernode_size: ranks per supernode, or one supernode label per global rank, or `"auto"`: by the Ascend rank
                table that `RANK_TABLE_FILE` names, else by what the NVIDIA driver says of the fabric, else ranks of one
                host share a supernode. Every rank must pass the same.
            group: with `"auto"`, the group over which ranks compare; it must hold all global ranks. None is the default
                group.

        With `"auto"` this is a collective: every rank must call.

        Raises:
            ConfigurationError: the size does not divide the number of ranks, the map has another length, or a rank
                table cannot be used.
        """
        if supernode_size == "auto":
            clues: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(clues, look_around(dist.get_rank()), group=group)
            labels, source = conclude(clues)
            return cls._for_world(cls(_dense(labels), source))
        if isinstance(supernode_size, int):
            return cls.from_supernode_size(dist.get_world_size(), supernode_size)
        if isinstance(supernode_size, str):
            raise ConfigurationError(
                f"supernode_size is {supernode_size!r}, but must be a number, one supernode label per rank, or 'auto'."
            )
        return cls._for_world(cls.from_map(supernode_size))

    @classmethod
    def _for_world(cls, topology: Topology) -> Topology:
        topology.check_world_size(dist.get_world_size())
        return topology

    # ---------------------------------------------------------------- questions

    @property
    def world_size(self) -> int:
        """Number of global ranks."""
        return len(self.supernode_of)

    @property
    def num_supernodes(self) -> int:
        """Number of supernodes."""
        return max(self.supernode_of) + 1

    @property
    def supernode_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each supernode."""
        return tuple(len(self.ranks_of(supernode)) for supernode in range(self.num_supernodes))

    def ranks_of(self, supernode: int) -> tuple[int, ...]:
        """Global ranks of a supernode, ascending."""
        if not 0 <= supernode < self.num_supernodes:
            raise ConfigurationError(f"supernode {supernode} does not exist: there are {self.num_supernodes}.")
        return tuple(rank for rank, found in enumerate(self.supernode_of) if found == supernode)

    def is_within_supernode(self, ranks: Iterable[int]) -> bool:
        """True if all of `ranks` share one supernode."""
        return len({self._of(rank) for rank in ranks}) <= 1

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigurationError unless this topology describes `world_size` ranks."""
        if self.world_size != world_size:
            raise ConfigurationError(
                f"the topology describes {self.world_size} ranks ({self.source}), but the job has {world_size}."
            )

    def describe(self) -> str:
        """What was found and how, for a log: a headline and one line per supernode."""
        plural = "" if self.num_supernodes == 1 else "s"
        lines = [f"topology: {self.num_supernodes} supernode{plural}, {self.world_size} ranks; from {self.source}"]
        for supernode in range(self.num_supernodes):
            ranks = self.ranks_of(supernode)
            lines.append(f"  supernode {supernode}: {len(ranks)} ranks ({format_ranks(ranks)})")
        return "\n".join(lines)

    def describe_crossing(self, ranks: Sequence[int]) -> str:
        """Names the ranks of a group by supernode, for messages: `ranks 0-1 in supernode 0, ranks 2-3 in ...`."""
        by_supernode: dict[int, list[int]] = {}
        for rank in ranks:
            by_supernode.setdefault(self._of(rank), []).append(rank)
        return ", ".join(f"ranks {format_ranks(found)} in supernode {s}" for s, found in by_supernode.items())

    def _of(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank {rank} is not among the {self.world_size} ranks of the topology.")
        return self.supernode_of[rank]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks with runs shortened: `(0, 1, 2, 5)` becomes `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _dense(labels: Iterable[Hashable]) -> tuple[int, ...]:
    """Labels renumbered 0, 1, ... by first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
