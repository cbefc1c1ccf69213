"""What ranks tell one another before they plan: that they have the same parameters, and what they own already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hp_plugin.core.muon.communicator import Communicators
from hp_plugin.core.muon.plan import MatrixParameter
from hp_plugin.errors import ConfigurationError


def compare_parameters(parameters: Sequence[MatrixParameter], communicators: Communicators) -> None:
    """Has the ranks of every domain compare their parameters. All of them must call.

    Raises:
        ConfigurationError: They differ; on every rank of the domain.
    """
    domains: dict[tuple[int, ...], list[MatrixParameter]] = {}
    for parameter in parameters:
        ranks = tuple(sorted(r for replica in parameter.shards(communicators.rank) for r in replica))
        domains.setdefault(ranks, []).append(parameter)
    for ranks in sorted(domains, key=lambda each: (len(each), each)):  # the same order on all ranks
        if len(ranks) > 1:
            members = domains[ranks]
            digests = {parameter.name: parameter.digest for parameter in members}
            check_agreement(members, communicators.over(ranks).all_gather_object(digests), ranks)


def loads_among(ranks: tuple[int, ...], load: int, communicators: Communicators) -> dict[int, int]:
    """The loads of all ranks of a domain. All of them must call.

    Args:
        ranks: Of the domain, ascending.
        load: Of this rank.
        communicators: How they are reached.
    """
    return dict(zip(ranks, communicators.over(ranks).all_gather_object(load), strict=True))


def check_agreement(
    parameters: Sequence[MatrixParameter], told: Sequence[Mapping[str, int]], ranks: Sequence[int]
) -> None:
    """Checks that the ranks of a domain have planned with the same parameters.

    Args:
        parameters: Those of the domain on this rank.
        told: Of each rank, the digest of each parameter by name.
        ranks: Global ranks, in the same order.

    Raises:
        ConfigurationError: Naming the first parameter that differs, and a rank where it does.
    """
    mine = {parameter.name: parameter.digest for parameter in parameters}
    for rank, theirs in zip(ranks, told, strict=True):
        if list(theirs) == list(mine) and theirs == mine:
            continue
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                have = "has other blocks, layout or options" if name in mine and name in theirs else "is on one of them"
                raise ConfigurationError(
                    f"Muon's exchange differs between ranks: parameter {name} {have} on this rank and on rank {rank}. "
                    "All ranks of its mesh must give the optimizer the same parameters with the same options"
                )
        raise ConfigurationError(
            f"Muon's exchange differs between ranks: rank {rank} has the same parameters in another order, "
            f"{list(theirs)[:4]}... and not {list(mine)[:4]}..."
        )
