"""build_mesh: axes and their groups, and the meshes that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_plugin.core.topology import AXES, Topology, build_mesh
from hp_plugin.core.topology.mesh import mesh_ranks, mesh_sizes
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.support import init_gloo, run_ranks


def sizes(world: int, **degrees: int) -> tuple[int, ...]:
    return mesh_sizes(world, **{"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, **degrees})


def test_dp_shard_takes_what_the_other_axes_leave() -> None:
    assert sizes(128, pp=2, dp_replicate=2, tp=8) == (2, 2, 4, 1, 8)
    assert sizes(1) == (1, 1, 1, 1, 1)
    assert sizes(8, dp_shard=4, cp=2) == (1, 1, 4, 2, 1)


@pytest.mark.parametrize(
    ("degrees", "sentence"),
    [
        ({"tp": 3}, "does not divide the 8 ranks"),
        ({"dp_shard": 2, "tp": 2}, "= 4, but there are 8 ranks"),
        ({"dp_shard": 0}, "degree of dp_shard is 0"),
        ({"tp": -1}, "degree of tp is -1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        sizes(8, **degrees)


def test_the_128_rank_example_lies_inside_supernodes_of_64() -> None:
    ranks = mesh_ranks((2, 2, 4, 1, 8), Topology.from_supernode_size(128, 32))
    assert ranks.flatten().tolist() == list(range(128))
    assert ranks[1, 0, :, 0, 0].tolist() == [64, 72, 80, 88]


def test_a_shard_group_across_supernodes_is_refused_with_its_ranks() -> None:
    topology = Topology.from_supernode_size(8, 4)
    with pytest.raises(ConfigurationError, match=r"ranks 0-3 in supernode 0, ranks 4-7 in supernode 1"):
        mesh_ranks(sizes(8), topology)
    with pytest.raises(ConfigurationError, match=r"ranks 0, 2 in supernode 0, ranks 4, 6 in supernode 1.* 1 more of"):
        mesh_ranks(sizes(8, tp=2), topology)
    assert mesh_ranks(sizes(8), topology, allow_cross_supernode=True).flatten().tolist() == list(range(8))


def test_cp_counts_as_a_shard_axis_and_tp_and_pp_do_not() -> None:
    topology = Topology.from_supernode_size(8, 4)
    with pytest.raises(ConfigurationError, match="dp_shard x cp"):
        mesh_ranks(sizes(8, dp_shard=4, cp=2), topology)
    mesh_ranks(sizes(8, dp_shard=1, cp=4, dp_replicate=2), topology)
    mesh_ranks(sizes(8, dp_shard=1, tp=8), topology)
    mesh_ranks(sizes(8, dp_shard=1, pp=8), topology)


def test_unequal_supernodes_are_judged_group_by_group() -> None:
    topology = Topology.from_map([0, 0, 1, 1, 1, 1])
    mesh_ranks(sizes(6, dp_shard=2, dp_replicate=3), topology)
    with pytest.raises(ConfigurationError, match="ranks 0-1 in supernode 0, ranks 2 in supernode 1"):
        mesh_ranks(sizes(6, dp_shard=3, dp_replicate=2), topology)


def test_interleaved_supernodes_are_laid_out_supernode_by_supernode() -> None:
    ranks = mesh_ranks(sizes(4, dp_replicate=2), Topology.from_map([0, 1, 0, 1]))
    assert ranks[0, :, :, 0, 0].tolist() == [[0, 2], [1, 3]]


def test_an_order_that_a_process_group_cannot_follow_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dp_replicate group would be \(3, 2\)"):
        mesh_ranks(sizes(4, dp_replicate=2), Topology.from_map([0, 1, 1, 0]))


def test_a_topology_of_another_job_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="describes 8 ranks"):
        mesh_ranks((1, 1, 4, 1, 1), Topology.from_supernode_size(8, 4))


def build(*, supernodes: list[int], **degrees: int) -> dict[str, Any]:
    init_gloo()
    mesh = build_mesh(topology=Topology.from_map(supernodes), device_type="cpu", **degrees)
    found: dict[str, Any] = {"names": mesh.mesh_dim_names, "shape": tuple(mesh.shape)}
    for axis in AXES:
        group = mesh.get_group(axis)
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group)
        ranks = dist.get_process_group_ranks(group)
        assert total.item() == sum(ranks)
        assert ranks[mesh.get_local_rank(axis)] == dist.get_rank()
        assert mesh[axis].get_group() is group
        found[axis] = ranks
    both = mesh["dp_replicate", "dp_shard"]
    assert both.mesh_dim_names == ("dp_replicate", "dp_shard")
    found["both"] = both.mesh.tolist()
    return found


def test_every_axis_has_its_group_and_submesh() -> None:
    results = run_ranks(4, build, supernodes=[0, 0, 1, 1], data_parallel_replicate_degree=2)
    for rank, found in enumerate(results):
        assert found["names"] == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert found["shape"] == (1, 2, 2, 1, 1)
        assert found["dp_shard"] == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        assert found["dp_replicate"] == [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
        assert found["pp"] == found["cp"] == found["tp"] == [rank]
        assert found["both"] == [[0, 1], [2, 3]]


def test_groups_follow_interleaved_supernodes() -> None:
    results = run_ranks(4, build, supernodes=[0, 1, 0, 1], data_parallel_replicate_degree=2)
    assert [found["dp_shard"] for found in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["dp_replicate"] for found in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_tp_runs_fastest() -> None:
    results = run_ranks(4, build, supernodes=[0, 0, 1, 1], tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert [found["tp"] for found in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [found["pp"] for found in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def build_defaults() -> tuple[Any, str]:
    init_gloo()
    with pytest.raises(UnsupportedError, match="expert_parallel_degree is 2"):
        build_mesh(expert_parallel_degree=2)
    mesh = build_mesh()
    return tuple(mesh.shape), mesh.device_type


def test_defaults_shard_over_the_host_on_the_device_that_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert run_ranks(1, build_defaults) == [((1, 1, 1, 1, 1), expected)]
