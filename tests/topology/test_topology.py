"""Where a topology comes from, what it answers, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.topology import Topology
from hp_plugin.core.topology.topology import format_ranks
from hp_plugin.errors import ConfigurationError
from tests.support import init_gloo, run_ranks


def test_a_size_gives_consecutive_supernodes() -> None:
    topology = Topology.from_supernode_size(8, 4)
    assert topology.supernode_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert (topology.world_size, topology.num_supernodes, topology.supernode_sizes) == (8, 2, (4, 4))
    assert topology.ranks_of(1) == (4, 5, 6, 7)


@pytest.mark.parametrize(("world", "size"), [(8, 3), (4, 8), (4, 0), (4, -2)])
def test_a_size_that_does_not_divide_is_refused_with_the_sizes_that_do(world: int, size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"size of {size} does not divide the {world} ranks.*choose one of"):
        Topology.from_supernode_size(world, size)


def test_unequal_and_interleaved_supernodes_are_kept_as_given() -> None:
    topology = Topology.from_map([7, 3, 7, 3, 3])
    assert topology.supernode_of == (0, 1, 0, 1, 1)
    assert topology.supernode_sizes == (2, 3)
    assert topology.ranks_of(1) == (1, 3, 4)


def test_ranks_of_one_host_share_a_supernode() -> None:
    topology = Topology.from_hostnames(["b", "b", "a", "a"])
    assert topology.supernode_of == (0, 0, 1, 1)
    assert "host names (2 different)" in topology.describe()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_ranks_of_is_the_inverse_of_the_map(labels: list[int]) -> None:
    topology = Topology.from_map(labels)
    assert sum(topology.supernode_sizes) == len(labels)
    for supernode in range(topology.num_supernodes):
        ranks = topology.ranks_of(supernode)
        assert ranks
        assert len({labels[rank] for rank in ranks}) == 1
        assert topology.is_within_supernode(ranks)


def test_questions_about_groups() -> None:
    topology = Topology.from_supernode_size(4, 2)
    assert topology.is_within_supernode((2, 3))
    assert not topology.is_within_supernode((1, 2))
    assert topology.is_within_supernode(())
    assert topology.describe_crossing((0, 1, 3)) == "ranks 0-1 in supernode 0, ranks 3 in supernode 1"
    with pytest.raises(ConfigurationError, match="rank 4 is not among the 4 ranks"):
        topology.is_within_supernode((4,))
    with pytest.raises(ConfigurationError, match="supernode 2 does not exist"):
        topology.ranks_of(2)
    with pytest.raises(ConfigurationError, match="describes 4 ranks .* but the job has 8"):
        topology.check_world_size(8)


def test_maps_that_are_not_dense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be 0, 1"):
        Topology((1, 0))
    with pytest.raises(ConfigurationError, match="at least one rank"):
        Topology.from_map([])


def test_describe_names_source_and_ranks() -> None:
    assert Topology.from_map([0, 0, 1, 0]).describe().splitlines() == [
        "topology: 2 supernodes, 4 ranks; from an explicit map of ranks to supernodes",
        "  supernode 0: 3 ranks (0-1, 3)",
        "  supernode 1: 1 ranks (2)",
    ]
    assert format_ranks([5, 0, 1, 2]) == "5, 0-2"


def detect() -> list[Topology]:
    init_gloo()
    return [Topology.detect(), Topology.detect(2), Topology.detect([0, 1, 0, 1])]


def test_detect_takes_host_names_sizes_and_maps() -> None:
    for by_host, by_size, by_map in run_ranks(4, detect):
        assert by_host.supernode_of == (0, 0, 0, 0)
        assert "host names" in by_host.source
        assert by_size.supernode_of == (0, 0, 1, 1)
        assert by_map.supernode_of == (0, 1, 0, 1)


def detect_wrong() -> list[str]:
    init_gloo()
    messages = []
    for wrong in (3, [0, 1, 1], "supernode"):
        with pytest.raises(ConfigurationError) as caught:
            Topology.detect(wrong)  # type: ignore[arg-type]
        messages.append(str(caught.value))
    return messages


def test_detect_refuses_what_does_not_fit_the_job() -> None:
    for messages in run_ranks(2, detect_wrong):
        assert "size of 3 does not divide the 2 ranks" in messages[0]
        assert "describes 3 ranks" in messages[1]
        assert "is 'supernode', but must be a number" in messages[2]
