"""A (dp_replicate, dp_shard) mesh over a data-parallel group that a host framework has made already."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.topology.mesh import check_ascending
from hp_plugin.core.topology.topology import Topology
from hp_plugin.errors import ConfigurationError

ShardSize = Union[int, Literal["supernode", "world"]]  # noqa: UP007  # evaluated at run time, also by Python 3.10


def mesh_from_group(
    group: dist.ProcessGroup,
    topology: Topology,
    *,
    shard_size: ShardSize,
    device_type: str,
    allow_cross_supernode: bool = False,
    timeout: datetime.timedelta | None = None,
) -> DeviceMesh:
    """A mesh with the axes `("dp_replicate", "dp_shard")` over the ranks of `group`.

    Every rank of the default group must call, each with the data-parallel group that it belongs to and otherwise the
    same arguments: the missing process groups are made collectively, in an order that all ranks derive from one list
    that they gather first. A mistake in any group is raised on all ranks alike.

    `group` itself serves as the shard (or replicate) group where it has exactly those ranks.

    Args:
        group: this rank's data-parallel group.
        topology: which ranks share a supernode.
        shard_size: `"supernode"`: the ranks of the group that share a supernode; `"world"`: the whole group; a
            number: that many ranks of the group, consecutive within a supernode.
        device_type: `"cpu"`, `"cuda"` or `"npu"`.
        allow_cross_supernode: accept a number whose shard groups reach over several supernodes.
        timeout: of the new process groups; None takes torch's default.

    Raises:
        ConfigurationError: see `shard_groups`; or ranks disagree about the members of a group or its settings.
    """
    topology.check_world_size(dist.get_world_size())
    mine = _Request(tuple(dist.get_process_group_ranks(group)), shard_size, allow_cross_supernode, _backend(group))
    requests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(requests, mine)
    _check_agreement(requests)

    mesh: DeviceMesh | None = None
    for request in sorted(set(requests), key=lambda request: request.ranks):
        shards = shard_groups(
            request.ranks,
            topology,
            shard_size=request.shard_size,
            allow_cross_supernode=request.allow_cross_supernode,
        )
        own = group if request.ranks == mine.ranks else None
        shard = _group_of_this_rank(shards, request, own=own, timeout=timeout)
        replicate = _group_of_this_rank(tuple(zip(*shards, strict=True)), request, own=own, timeout=timeout)
        if shard is not None and replicate is not None:
            mesh = DeviceMesh.from_group(
                [replicate, shard], device_type, torch.tensor(shards), mesh_dim_names=("dp_replicate", "dp_shard")
            )
    assert mesh is not None  # _check_agreement: this rank is in the group that it named
    return mesh


def shard_groups(
    ranks: Sequence[int], topology: Topology, *, shard_size: ShardSize, allow_cross_supernode: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Divides the ranks of one data-parallel group into shard groups. No communication.

    Args:
        ranks: global ranks of the group, in group order.
        topology: which ranks share a supernode.
        shard_size: as in `mesh_from_group`.
        allow_cross_supernode: as in `mesh_from_group`.

    Returns:
        One tuple per shard group. The ranks at equal positions of all tuples form a replicate group.

    Raises:
        ConfigurationError: the size does not divide the group, the group's supernodes hold unequal shares of it, a
            shard group would reach over several supernodes, or members would be numbered out of order.
    """
    if isinstance(shard_size, bool) or not (isinstance(shard_size, int) or shard_size in ("supernode", "world")):
        raise ConfigurationError(f"shard_size is {shard_size!r}, but must be a number, 'supernode' or 'world'.")
    ranks = tuple(ranks)
    if shard_size == "world":
        groups = [ranks]
    elif shard_size == "supernode":
        groups = _by_supernode(ranks, topology)
        if len({len(found) for found in groups}) > 1:
            raise ConfigurationError(
                f"shard_size is 'supernode', but the data-parallel group {ranks} has unequal shares in its "
                f"supernodes: {topology.describe_crossing(ranks)}. Use a number that divides every share, or 'world'."
            )
    else:
        groups = _blocks(ranks, topology, int(shard_size), allow_cross_supernode=allow_cross_supernode)
    for found, axis in [(g, "dp_shard") for g in groups] + [(g, "dp_replicate") for g in zip(*groups, strict=True)]:
        check_ascending(found, axis=axis)
    return tuple(groups)


def _by_supernode(ranks: tuple[int, ...], topology: Topology) -> list[tuple[int, ...]]:
    """The ranks of each supernode, supernodes in order of their first rank in the group."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(topology.supernode_of[rank], []).append(rank)
    return [tuple(members) for members in found.values()]


def _blocks(
    ranks: tuple[int, ...], topology: Topology, size: int, *, allow_cross_supernode: bool
) -> list[tuple[int, ...]]:
    """Blocks of `size` ranks, inside supernodes if their shares divide, else over them where that is allowed."""
    if size < 1 or len(ranks) % size:
        raise ConfigurationError(
            f"shard_size {size} does not divide the {len(ranks)} ranks of the data-parallel group {ranks}; use a "
            "divisor of that number, 'supernode' or 'world'."
        )
    shares = _by_supernode(ranks, topology)
    if all(len(share) % size == 0 for share in shares):
        return [share[start : start + size] for share in shares for start in range(0, len(share), size)]
    if not allow_cross_supernode:
        raise ConfigurationError(
            f"shard groups of {size} ranks cannot lie inside the supernodes of the data-parallel group {ranks}: "
            f"{topology.describe_crossing(ranks)}. Use a number that divides every supernode's share, or allow shard "
            "groups across supernodes (allow_cross_supernode)."
        )
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


@dataclass(frozen=True)
class _Request:
    """What one rank asks for; equal on all ranks of its group."""

    ranks: tuple[int, ...]
    shard_size: ShardSize
    allow_cross_supernode: bool
    backend: str


def _check_agreement(requests: Sequence[_Request]) -> None:
    """Raises, on every rank alike, unless the ranks of each named group all named it and named it alike."""
    for rank, request in enumerate(requests):
        if rank not in request.ranks:
            raise ConfigurationError(
                f"rank {rank} passed the data-parallel group {request.ranks}, of which it is no member; every rank "
                "must pass its own group."
            )
        for member in request.ranks:
            if requests[member] != request:
                raise ConfigurationError(
                    f"ranks {rank} and {member} disagree: rank {rank} asks for {request}, rank {member} for "
                    f"{requests[member]}. All ranks of a data-parallel group must pass that group and equal settings."
                )


def _group_of_this_rank(
    rank_lists: Sequence[tuple[int, ...]],
    request: _Request,
    *,
    own: dist.ProcessGroup | None,
    timeout: datetime.timedelta | None,
) -> dist.ProcessGroup | None:
    """Makes a process group per list, except for the whole group, and returns the one that this rank belongs to."""
    found = None
    for ranks in rank_lists:
        if ranks == request.ranks:
            return own
        group = dist.new_group(list(ranks), backend=request.backend, timeout=timeout)
        if dist.get_rank() in ranks:
            found = group
    return found


def _backend(group: dist.ProcessGroup) -> str:
    """The backend of `group` in the form that new_group takes, e.g. `cpu:gloo,cuda:nccl`."""
    return str(dist.get_backend_config(group))
