"""mesh_from_group: the shard and replicate groups inside a host framework's data-parallel groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_plugin.core.topology import Topology, mesh_from_group, shard_groups
from hp_plugin.errors import ConfigurationError
from tests.support import init_gloo, run_ranks

TWO_BY_TWO = Topology.from_supernode_size(4, 2)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("supernode", ((0, 1), (2, 3))),
        ("world", ((0, 1, 2, 3),)),
        (1, ((0,), (1,), (2,), (3,))),
        (2, ((0, 1), (2, 3))),
    ],
)
def test_shard_sizes(size: Any, expected: tuple[tuple[int, ...], ...]) -> None:
    assert shard_groups((0, 1, 2, 3), TWO_BY_TWO, shard_size=size) == expected


def test_only_the_ranks_of_the_group_count() -> None:
    """With tensor parallelism of 2, a data-parallel group holds every other rank."""
    topology = Topology.from_supernode_size(8, 4)
    assert shard_groups((1, 3, 5, 7), topology, shard_size="supernode") == ((1, 3), (5, 7))


def test_interleaved_supernodes_give_groups_inside_them() -> None:
    topology = Topology.from_map([0, 1, 0, 1])
    assert shard_groups((0, 1, 2, 3), topology, shard_size="supernode") == ((0, 2), (1, 3))
    assert shard_groups((0, 1, 2, 3), topology, shard_size=2) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("size", "supernodes", "sentence"),
    [
        ("supernode", [0, 0, 0, 1], "unequal shares.*ranks 0-2 in supernode 0, ranks 3 in supernode 1"),
        (3, [0, 0, 1, 1], "shard_size 3 does not divide the 4 ranks"),
        (0, [0, 0, 1, 1], "shard_size 0 does not divide"),
        (4, [0, 0, 1, 1], "cannot lie inside the supernodes.*ranks 0-1 in supernode 0, ranks 2-3 in supernode 1"),
        (2, [0, 0, 0, 1], "cannot lie inside the supernodes"),
        ("node", [0, 0, 1, 1], "must be a number, 'supernode' or 'world'"),
        (True, [0, 0, 1, 1], "must be a number, 'supernode' or 'world'"),
        ("supernode", [0, 1, 1, 0], r"dp_replicate group would be \(3, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused(size: Any, supernodes: list[int], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        shard_groups((0, 1, 2, 3), Topology.from_map(supernodes), shard_size=size)


def test_crossing_is_possible_when_asked_for() -> None:
    assert shard_groups((0, 1, 2, 3), TWO_BY_TWO, shard_size=4, allow_cross_supernode=True) == ((0, 1, 2, 3),)
    uneven = Topology.from_map([0, 0, 0, 1])
    assert shard_groups((0, 1, 2, 3), uneven, shard_size=2, allow_cross_supernode=True) == ((0, 1), (2, 3))


def adopt(*, shard_size: Any, stride: int = 1) -> dict[str, Any]:
    """Makes `stride` interleaved data-parallel groups as a host would, and adopts this rank's."""
    init_gloo()
    rank, world = dist.get_rank(), dist.get_world_size()
    hosts = [dist.new_group(list(range(offset, world, stride))) for offset in range(stride)]
    host = hosts[rank % stride]
    mesh = mesh_from_group(host, TWO_BY_TWO, shard_size=shard_size, device_type="cpu")
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    for axis in ("dp_replicate", "dp_shard"):
        group = mesh.get_group(axis)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(dist.get_process_group_ranks(group))
        assert mesh[axis].get_group() is group
    full = torch.arange(12.0).view(6, 2)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    assert isinstance(tensor, DTensor)
    assert torch.equal(tensor.full_tensor(), full)
    return {
        "mesh": mesh.mesh.tolist(),
        "coordinate": list(mesh.get_coordinate()),
        "reused": [axis for axis in ("dp_replicate", "dp_shard") if mesh.get_group(axis) is host],
    }


def test_one_host_group_over_two_supernodes() -> None:
    results = run_ranks(4, adopt, shard_size="supernode")
    assert [found["mesh"] for found in results] == [[[0, 1], [2, 3]]] * 4
    assert [found["coordinate"] for found in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [found["reused"] for found in results] == [[]] * 4


def test_the_host_group_itself_serves_where_it_has_the_ranks() -> None:
    assert [found["reused"] for found in run_ranks(4, adopt, shard_size="world")] == [["dp_shard"]] * 4
    assert [found["reused"] for found in run_ranks(4, adopt, shard_size=1)] == [["dp_replicate"]] * 4


def test_several_host_groups_each_give_their_own_mesh() -> None:
    """Data-parallel groups (0, 2) and (1, 3): one rank of each supernode, so nothing to shard inside."""
    results = run_ranks(4, adopt, shard_size="supernode", stride=2)
    assert [found["mesh"] for found in results] == [[[0], [2]], [[1], [3]], [[0], [2]], [[1], [3]]]
    results = run_ranks(4, adopt, shard_size="world", stride=2)
    assert [found["mesh"] for found in results] == [[[0, 2]], [[1, 3]], [[0, 2]], [[1, 3]]]


def test_host_groups_of_one_rank() -> None:
    results = run_ranks(4, adopt, shard_size="supernode", stride=4)
    assert [found["mesh"] for found in results] == [[[0]], [[1]], [[2]], [[3]]]


def disagree() -> str:
    init_gloo()
    size = "world" if dist.get_rank() == 0 else "supernode"
    with pytest.raises(ConfigurationError) as caught:
        mesh_from_group(dist.group.WORLD, TWO_BY_TWO, shard_size=size, device_type="cpu")
    return str(caught.value)


def test_ranks_that_disagree_all_raise_instead_of_hanging() -> None:
    messages = run_ranks(4, disagree)
    assert len(set(messages)) == 1
    assert "ranks 0 and 1 disagree" in messages[0]


def refuse_unequal() -> str:
    init_gloo()
    with pytest.raises(ConfigurationError) as caught:
        mesh_from_group(dist.group.WORLD, Topology.from_map([0, 0, 1]), shard_size="supernode", device_type="cpu")
    return str(caught.value)


def test_unequal_supernodes_are_refused_on_all_ranks_alike() -> None:
    messages = run_ranks(3, refuse_unequal)
    assert len(set(messages)) == 1
    assert "unequal shares" in messages[0]
