"""One device mesh over all ranks, with an axis for every technique."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.devices import default_device_type
from hp_plugin.core.topology.topology import Topology
from hp_plugin.errors import ConfigurationError, UnsupportedError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SHARD_AXES = ("dp_shard", "cp")  # weights are divided over both: they are replicas along cp as well


def build_mesh(
    *,
    tensor_parallel_degree: int = 1,
    pipeline_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    data_parallel_replicate_degree: int = 1,
    data_parallel_shard_degree: int = -1,
    expert_parallel_degree: int = 1,
    topology: Topology | None = None,
    device_type: str | None = None,
    allow_cross_supernode: bool = False,
) -> DeviceMesh:
    """A mesh of all ranks with the axes `pp, dp_replicate, dp_shard, cp, tp`, in that order.

    Each technique takes its own part: `mesh["tp"]`, `mesh["dp_shard"]`, `mesh["dp_replicate", "dp_shard"]`. Ranks are
    laid out supernode by supernode with `tp` running fastest, so neighbours of the inner axes are close.

    Every rank of the default group must call with the same arguments: process groups are made.

    Args:
        tensor_parallel_degree: size of `tp`.
        pipeline_parallel_degree: size of `pp`.
        context_parallel_degree: size of `cp`.
        data_parallel_replicate_degree: size of `dp_replicate`.
        data_parallel_shard_degree: size of `dp_shard`; -1 takes all ranks that the other axes leave.
        expert_parallel_degree: must be 1.
        topology: which ranks share a supernode; None asks `Topology.detect()`.
        device_type: `"cpu"`, `"cuda"` or `"npu"`; None takes the accelerator of this machine, else the CPU.
        allow_cross_supernode: accept shard groups (`dp_shard` times `cp`) that reach over several supernodes.

    Raises:
        ConfigurationError: the degrees do not multiply to the number of ranks, a shard group crosses supernodes, or
            the ranks of supernodes interleave in a way that a process group cannot follow.
        UnsupportedError: `expert_parallel_degree` is not 1.
    """
    if expert_parallel_degree != 1:
        raise UnsupportedError(
            f"expert_parallel_degree is {expert_parallel_degree}, but expert parallelism is not built yet; use 1."
        )
    sizes = mesh_sizes(
        dist.get_world_size(),
        pp=pipeline_parallel_degree,
        dp_replicate=data_parallel_replicate_degree,
        dp_shard=data_parallel_shard_degree,
        cp=context_parallel_degree,
        tp=tensor_parallel_degree,
    )
    topology = topology if topology is not None else Topology.detect()
    ranks = mesh_ranks(sizes, topology, allow_cross_supernode=allow_cross_supernode)
    return DeviceMesh(device_type or default_device_type(), ranks, mesh_dim_names=AXES)


def mesh_sizes(world_size: int, *, pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int) -> tuple[int, ...]:
    """The axis sizes in the order of `AXES`, with a `dp_shard` of -1 filled in. Refuses what does not multiply."""
    degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    for axis, degree in degrees.items():
        if degree < 1 and not (axis == "dp_shard" and degree == -1):
            raise ConfigurationError(f"the degree of {axis} is {degree}, but must be at least 1.")
    others = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
    if dp_shard == -1:
        if world_size % others:
            raise ConfigurationError(
                f"pp {pp} x dp_replicate {dp_replicate} x cp {cp} x tp {tp} = {others} does not divide the "
                f"{world_size} ranks, so no size of dp_shard fits; change one of these degrees."
            )
        degrees["dp_shard"] = world_size // others
    elif others * dp_shard != world_size:
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise ConfigurationError(
            f"{text} = {others * dp_shard}, but there are {world_size} ranks; change a degree, or let dp_shard be -1."
        )
    return tuple(degrees[axis] for axis in AXES)


def mesh_ranks(sizes: tuple[int, ...], topology: Topology, *, allow_cross_supernode: bool = False) -> torch.Tensor:
    """The global ranks of a mesh with these axis sizes: an int tensor of shape `sizes`. No communication."""
    topology.check_world_size(math.prod(sizes))
    by_supernode = sorted(range(topology.world_size), key=lambda rank: (topology.supernode_of[rank], rank))
    ranks = torch.tensor(by_supernode, dtype=torch.int).view(sizes)
    for axis in range(len(sizes)):
        for line in _lines(ranks, (axis,)):
            check_ascending(line, axis=AXES[axis])
    if not allow_cross_supernode:
        shard_axes = tuple(AXES.index(axis) for axis in _SHARD_AXES)
        crossing = [g for g in _lines(ranks, shard_axes) if not topology.is_within_supernode(g)]
        if crossing:
            raise ConfigurationError(_crossing_message(crossing, topology))
    return ranks


def check_ascending(ranks: tuple[int, ...], *, axis: str) -> None:
    """Refuses a mesh line whose ranks do not ascend: a process group numbers its members by global rank."""
    if list(ranks) != sorted(ranks):
        raise ConfigurationError(
            f"the ranks of a {axis} group would be {ranks}, but a process group numbers its members in ascending "
            "order, so mesh and group would disagree. Number the ranks so that supernodes hold consecutive ranks."
        )


def _lines(ranks: torch.Tensor, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All groups of ranks that differ in `axes` alone, in mesh order."""
    others = [axis for axis in range(ranks.ndim) if axis not in axes]
    count = math.prod(ranks.size(axis) for axis in axes)
    for line in ranks.permute(*others, *axes).reshape(-1, count).tolist():
        yield tuple(line)


def _crossing_message(crossing: list[tuple[int, ...]], topology: Topology) -> str:
    first = topology.describe_crossing(crossing[0])
    more = f" So do {len(crossing) - 1} more of these groups." if len(crossing) > 1 else ""
    return (
        f"a shard group (dp_shard x cp) reaches over several supernodes: {first}.{more} Sharded parameters would be "
        "gathered over the slow links in every layer. Use a larger data_parallel_replicate_degree (or a smaller "
        "data_parallel_shard_degree), or pass allow_cross_supernode=True if this is what you want."
    )
