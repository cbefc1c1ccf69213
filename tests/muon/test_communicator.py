"""Communicators over process groups, and that the simulated ones of these tests do the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin.core.muon.communicator import Communicators, GroupCommunicators, share_from
from tests.muon.simulation import simulate
from tests.support import init_gloo, run_ranks

WORLD = 3


def exercise(communicators: Communicators) -> list[Any]:
    """Everything that a communicator does, with messages of different sizes, some empty."""
    rank = communicators.rank
    found: list[Any] = [rank]
    for ranks in ((0, 1, 2), (0, 2)):
        if rank not in ranks:
            continue
        communicator = communicators.over(ranks)
        assert communicators.over(ranks) is communicator
        assert communicator.ranks == ranks
        assert communicator.ranks[communicator.position] == rank
        # Rank a sends b elements to position b: none to the first.
        sends = list(range(len(ranks)))
        receives = [communicator.position] * len(ranks)
        source = 100.0 * rank + torch.arange(sum(sends), dtype=torch.float32)
        output = torch.empty(sum(receives))
        pending = communicator.all_to_all(output, source, (receives, sends))
        gathered = torch.empty(2 * len(ranks), dtype=torch.bfloat16)
        later = communicator.all_gather(gathered, torch.full((2,), rank, dtype=torch.bfloat16))
        pending.wait()
        later.wait()
        values = torch.full((2, 2), float(rank))
        share_from(communicator, ranks[-1], values)
        found += [output.tolist(), gathered.tolist(), communicator.all_gather_object({"rank": rank}), values.tolist()]
    return found


def over_gloo() -> list[Any]:
    init_gloo()
    return exercise(GroupCommunicators())


def test_simulated_ranks_exchange_what_processes_do() -> None:
    processes = run_ranks(WORLD, over_gloo)
    assert processes == simulate(WORLD, exercise)
    rank, output, gathered, objects, values = processes[1]
    assert (rank, output, gathered) == (1, [0.0, 100.0, 200.0], [0, 0, 1, 1, 2, 2])
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert values == [[2.0, 2.0], [2.0, 2.0]]


def groups_made() -> int:
    """Communicators over a mesh's axes, the world and known groups need no new group."""
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    communicators = GroupCommunicators()
    communicators.know_mesh(mesh)
    made = 0
    new_group = dist.new_group

    def count(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return new_group(*args, **options)

    dist.new_group = count
    for axis in range(2):
        communicators.over(tuple(dist.get_process_group_ranks(mesh.get_group(axis))))
    communicators.over((0, 1, 2, 3))
    assert made == 0
    if dist.get_rank() in (0, 3):  # a diagonal: of no axis, and made without the others
        assert communicators.over((0, 3)).all_gather_object(dist.get_rank()) == [0, 3]
    return made


def test_groups_that_exist_are_used() -> None:
    assert run_ranks(4, groups_made) == [1, 0, 0, 1]


def test_without_processes_the_rank_is_zero() -> None:
    assert GroupCommunicators().rank == 0


def test_a_rank_that_fails_ends_the_simulation() -> None:
    def work(communicators: Communicators) -> None:
        if communicators.rank == 1:
            raise ValueError("broken")
        communicators.over((0, 1)).all_gather_object(None)

    with pytest.raises(ValueError, match="broken"):
        simulate(2, work)
