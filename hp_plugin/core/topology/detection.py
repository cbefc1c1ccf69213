"""What each rank knows of where it is, and which supernodes follow from what all of them know."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_plugin.core.devices.domains import RANK_TABLE_VARIABLE, Domain, own_domain, rank_table_in
from hp_plugin.errors import ConfigurationError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Clue:
    """What one rank knows.

    Attributes:
        host: Host name.
        machine: Differs between machines, whatever they are called; empty where the kernel does not tell.
        table: Domain that the rank table gives this rank; None where no table is named.
        table_ranks: Ranks in that table.
        fabric: Domain that the driver of the device tells; None where it tells none.
        problem: Why the rank table cannot be used; None: nothing is wrong.
    """

    host: str
    machine: str = ""
    table: Domain | None = None
    table_ranks: int = 0
    fabric: Domain | None = None
    problem: str | None = None


def look_around(rank: int, environment: Mapping[str, str] = os.environ) -> Clue:
    """The clue of this process. No communication; never raises, so that all ranks get to compare what they have.

    Args:
        rank: Global rank of this process.
        environment: Variables.
    """
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    table, count, problem = None, 0, None
    try:
        found = rank_table_in(environment)
        if found is not None:
            count = len(found.domains)
            table = Domain(found.domains[rank] if rank < count else "", found.source)
    except ConfigurationError as error:
        problem = str(error)
    return Clue(socket.gethostname(), machine, table, count, own_domain(), problem)


def conclude(clues: Sequence[Clue]) -> tuple[list[Hashable], str]:
    """A label for every rank, equal for ranks that share a supernode, and where it is from.

    In this order: the rank table, fabric identifiers, host names. The same clues give the same answer on every rank.

    Args:
        clues: Of every global rank.

    Raises:
        ConfigurationError: A rank table cannot be read, is named on some ranks only, or is that of another job.
    """
    for rank, clue in enumerate(clues):
        if clue.problem is not None:
            raise ConfigurationError(f"rank {rank}: {clue.problem}")
    with_table = [rank for rank, clue in enumerate(clues) if clue.table is not None]
    if with_table:
        return _by_table(clues, with_table)
    with_fabric = [rank for rank, clue in enumerate(clues) if clue.fabric is not None]
    if len(with_fabric) == len(clues):
        sources = {clue.fabric.source for clue in clues if clue.fabric is not None}
        return [clue.fabric.label for clue in clues if clue.fabric is not None], " and ".join(sorted(sources))
    labels, source = _by_host(clues)
    if with_fabric:
        source += f"; {len(clues) - len(with_fabric)} of {len(clues)} ranks are in no fabric beyond their host"
    return labels, source


def _by_table(clues: Sequence[Clue], with_table: Sequence[int]) -> tuple[list[Hashable], str]:
    if len(with_table) != len(clues):
        without = next(rank for rank, clue in enumerate(clues) if clue.table is None)
        raise ConfigurationError(
            f"{RANK_TABLE_VARIABLE} is set on rank {with_table[0]} and not on rank {without}; set it on all "
            "ranks or on none"
        )
    for rank, clue in enumerate(clues):
        if clue.table_ranks != len(clues):
            raise ConfigurationError(
                f"rank {rank}: {RANK_TABLE_VARIABLE} names a table of {clue.table_ranks} ranks, but the job has "
                f"{len(clues)}; name the table of this job, or give the supernode size"
            )
    tables = [clue.table for clue in clues if clue.table is not None]
    return [table.label for table in tables], tables[0].source


def _by_host(clues: Sequence[Clue]) -> tuple[list[Hashable], str]:
    machines: dict[str, set[str]] = {}
    for clue in clues:
        machines.setdefault(clue.host, set()).add(clue.machine)
    if all(len(found) == 1 for found in machines.values()):
        return [clue.host for clue in clues], f"host names ({len(machines)} different)"
    pairs = [(clue.host, clue.machine) for clue in clues]
    shared = sorted(host for host, found in machines.items() if len(found) > 1)
    found = f"{len(set(pairs))} different; several machines are called {', '.join(shared)}"
    return list(pairs), f"host names and boot identifiers ({found})"
