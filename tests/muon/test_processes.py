"""HyperMuon in real processes over gloo: DTensors on any mesh, our fully_shard, checkpoints, overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp.conftest import transport as transport  # a fixture
from tests.muon import ranks
from tests.support import run_ranks

Mesh = tuple[int, ...]


def named(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


def check_dtensors(world: int, meshes: list[Mesh]) -> None:
    by_rank = run_ranks(world, ranks.step_dtensors, meshes=meshes, timeout=240.0)
    for runs in zip(*by_rank, strict=True):
        assert sum(each["newton_schulz_calls"] for each in runs) == len(ranks.SHAPES)
        assert all(each["collectives"] <= 2 * each["waves"] for each in runs)


@pytest.mark.parametrize(
    ("world", "meshes"), [(2, [(2,), (2, 1), (1, 2)]), (3, [(3,)]), (4, [(4,), (2, 2), (1, 2, 2)])], ids=["2", "3", "4"]
)
def test_dtensors_have_the_bits_of_one_process_and_replicas_stay_alike(world: int, meshes: list[Mesh]) -> None:
    check_dtensors(world, meshes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "meshes"), [(6, [(6,), (3, 2), (1, 3, 2)]), (8, [(8,), (2, 4), (4, 2), (2, 2, 2)])], ids=["6", "8"]
)
def test_dtensors_on_more_ranks(world: int, meshes: list[Mesh]) -> None:
    check_dtensors(world, meshes)


def test_experts_and_dense_matrices_on_different_meshes() -> None:
    results = run_ranks(4, ranks.step_experts_and_dense)
    assert sum(calls for calls, _, _ in results) == 3 + 1 + 3 + 1
    assert all(loads == results[0][2] and len(loads) == 4 for _, _, loads in results)
    # Dense: out and back. Experts, whole on each rank of a replica: back alone.
    assert all(collectives == 3 for _, collectives, _ in results)


def test_groups_of_ranks_that_share_nothing_do_not_wait_for_each_other() -> None:
    assert run_ranks(4, ranks.step_apart_groups) == [2] * 4


def test_ranks_without_gradients_take_part() -> None:
    results = run_ranks(4, ranks.step_with_missing_gradients)
    for step in range(3):
        assert sum(found[step][0] for found in results) == 3
        assert [found[step][1] for found in results] == [2] * 4


@pytest.mark.parametrize("momentum_placement", ["replicated", "owner"])
def test_replicas_without_a_mesh_share_the_work(momentum_placement: str) -> None:
    results = run_ranks(3, ranks.step_replicas, momentum_placement=momentum_placement)
    assert sum(calls for calls, _, _ in results) == len(ranks.SHAPES)
    assert [collectives for _, collectives, _ in results] == [1] * 3
    copies = len(ranks.SHAPES) * (3 if momentum_placement == "replicated" else 1)
    assert sum(kept for _, _, kept in results) == copies


# ---- our fully_shard -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=named)
def test_fully_sharded_models_have_the_bits_of_their_own_gradients(mesh: Mesh, transport: str) -> None:
    results = run_ranks(
        mesh[0] * mesh[1],
        ranks.train_sharded,
        replicate=mesh[0],
        shard=mesh[1],
        micro_batches=3,
        steps=2,
        timeout=180.0,
    )
    assert all(losses == results[0] for losses in results)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 4), (4, 1), (2, 4)], ids=named)
def test_fully_sharded_models_on_more_ranks(mesh: Mesh, transport: str) -> None:
    run_ranks(
        mesh[0] * mesh[1],
        ranks.train_sharded,
        replicate=mesh[0],
        shard=mesh[1],
        micro_batches=1,
        steps=3,
        timeout=280.0,
    )


# ---- checkpoints -----------------------------------------------------------------------------------------------------

TRANSFERS: list[tuple[Mesh, list[Mesh]]] = [
    ((2, 2), [(1,), (1, 2, 2)]),
]
FULL_TRANSFERS: list[tuple[Mesh, list[Mesh]]] = [
    ((4,), [(4,), (3,), (2, 2)]),
    ((2, 2, 2), [(8,), (4, 2), (1, 2, 3), (1,)]),
    ((8,), [(2, 2, 2), (3,)]),
]


def check_transfers(source: Mesh, targets: list[Mesh], path: Path, options: dict[str, Any]) -> None:
    directory = str(path / "checkpoint")
    arguments: dict[str, Any] = {"directory": directory, "options": options, "timeout": 180.0}
    (saved, ended), *others = run_ranks(_size(source), ranks.save_and_go_on, mesh=source, **arguments)
    for other_saved, other_ended in others:
        assert_same_state(other_saved, saved)
        assert_same_state(other_ended, ended)
    for target in targets:
        for loaded, finished in run_ranks(_size(target), ranks.load_and_go_on, mesh=target, **arguments):
            assert_same_state(loaded, saved)
            assert_same_state(finished, ended)


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _size(mesh: Mesh) -> int:
    total = 1
    for size in mesh:
        total *= size
    return total


@pytest.mark.parametrize(("source", "targets"), TRANSFERS, ids=lambda each: named(each) if type(each) is tuple else "")
def test_a_checkpoint_of_one_mesh_goes_on_bit_by_bit_on_others(
    source: Mesh, targets: list[Mesh], tmp_path: Path
) -> None:
    check_transfers(source, targets, tmp_path, {})


def test_a_checkpoint_of_momentum_on_the_owner_goes_on_bit_by_bit(tmp_path: Path) -> None:
    check_transfers((2, 2), [(2, 1)], tmp_path, {"momentum_placement": "owner"})


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "targets"), FULL_TRANSFERS, ids=lambda each: named(each) if type(each) is tuple else ""
)
def test_checkpoints_of_more_ranks(source: Mesh, targets: list[Mesh], tmp_path: Path) -> None:
    check_transfers(source, targets, tmp_path, {})


# ---- overflow and refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["dtensor", "plain"])
def test_an_overflow_on_one_rank_keeps_all_ranks_where_they_are(plain: bool) -> None:
    assert run_ranks(2, ranks.overflow_on_one_rank, plain=plain) == [[64.0, 32.0, 32.0]] * 2


def test_values_that_are_still_to_be_reduced_are_refused() -> None:
    run_ranks(2, ranks.refuse_partial)


def test_ranks_that_disagree_learn_which_parameter_it_is() -> None:
    run_ranks(2, ranks.disagree)
