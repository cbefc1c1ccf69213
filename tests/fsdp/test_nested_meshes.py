"""Units on another mesh than the unit they lie in, on both transports, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.fsdp import nested_meshes
from tests.fsdp.conftest import TRANSPORTS
from tests.support import run_ranks

# Sizes (replicate, shard) of the outer mesh, number of experts, replicas of an expert's mesh.
MESHES = {
    "experts are replicas": ([2, 2], 2, 2),
    "experts are shards": ([1, 4], 2, 1),
    "experts shard across what replicates the rest": ([2, 2], 2, 1),
    "every rank has its own expert": ([1, 4], 4, 1),
    "nothing is sharded but experts": ([4, 1], 2, 1),
}
EXPECTED_TRANSPORT = {
    "experts are replicas": (True, False),
    "experts are shards": (True, True),
    "experts shard across what replicates the rest": (True, True),
    "every rank has its own expert": (True, False),
    "nothing is sharded but experts": (False, True),
}


def assert_equals_one_process(found: dict[str, Any]) -> None:
    assert found["loss"] < 1e-5
    assert found["gradient"] < 5e-6
    assert found["weight"] < 1e-5
    assert found["wrongly delivered"] == 0


@pytest.mark.parametrize(
    "meshes",
    [pytest.param(name, marks=[] if name == "experts are shards" else [pytest.mark.full]) for name in MESHES],
)
def test_training_equals_one_process(meshes: str, transport: str) -> None:
    dense, count, replicate = MESHES[meshes]
    for found in run_ranks(4, nested_meshes.compare, dense=dense, count=count, replicate=replicate):
        assert_equals_one_process(found)
        outer_moves, experts_move = EXPECTED_TRANSPORT[meshes]
        for name, moved_by in found["transports"].items():
            moves = experts_move if "experts" in name else outer_moves
            assert moved_by == (transport if moves else None), name
        assert len(found["transports"]) == 7


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": 1},
        {"bucket_bytes": 1 << 20, "window": 1},
        {"prefetch": 0},
        {"prefetch": 1 << 20},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("meshes", ["experts are shards", pytest.param("experts are replicas", marks=pytest.mark.full)])
@pytest.mark.full
def test_options_hold_for_every_mesh_under_the_root(meshes: str, options: dict[str, Any], transport: str) -> None:
    dense, count, replicate = MESHES[meshes]
    for found in run_ranks(4, nested_meshes.compare, dense=dense, count=count, replicate=replicate, **options):
        assert_equals_one_process(found)


@pytest.mark.full
@pytest.mark.parametrize("meshes", ["experts are replicas"])
def test_gradients_of_experts_go_to_an_owner_among_their_own_replicas(meshes: str, transport: str) -> None:
    dense, count, replicate = MESHES[meshes]
    for found in run_ranks(4, nested_meshes.compare, dense=dense, count=count, replicate=replicate, owned=True):
        assert_equals_one_process(found)


@pytest.mark.full
@pytest.mark.parametrize("meshes", ["experts are shards", "experts are replicas"])
def test_deterministic_runs_have_the_same_bits_on_both_transports(meshes: str) -> None:
    dense, count, replicate = MESHES[meshes]
    runs = [
        run_ranks(4, nested_meshes.bits, env={TRANSPORT_VARIABLE: each}, dense=dense, count=count, replicate=replicate)
        for each in TRANSPORTS
    ]
    for mine, other in zip(*runs, strict=True):
        assert len(mine) == len(other) > 100
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.full
def test_a_divisor_of_the_inner_mesh_alone_would_be_seen() -> None:
    """The negative control: without the outer divisor, gradients of experts are too large."""
    for found in run_ranks(4, nested_meshes.compare, dense=[1, 4], count=2, replicate=1, own_divisor=True):
        assert found["gradient"] > 0.5
