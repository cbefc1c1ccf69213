"""What is refused before memory is shared: other units, too little memory, limits. And neighbours of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.faults import shared, shared_start
from tests.faults.cases import FAILING_RANK
from tests.faults.watched import nothing_is_left
from tests.support import run_ranks
from tests.support.ranks import current_session
from tests.support.releases import TORCH

SHM = {TRANSPORT_VARIABLE: "shm"}
# How the units of rank 1 differ from those of rank 0: what names the first difference.
DIFFERENCES = {
    "name": "Unit 1 of rank 0 and of rank 1: layers.b and layers.x.",
    "shape": "Unit 1 of rank 0 and of rank 1: shape of weight of layers.b is (6, 6) and (7, 6).",
    "dtype": "compute dtype of weight of layers.a is torch.float32 and torch.bfloat16.",
    "reduce dtype": "reduce dtype of layers.a is torch.float32 and torch.bfloat16.",
    "one more": "Unit 3 of rank 0 and of rank 1: none and layers.d.",
    "one less": "shape of weight of layers.b is (6, 6) and (4, 6).",
    "not sharded": "Unit 0 of rank 0 and of rank 1: layers.a and root (FSDPLayers).",
    "two in one": "layers.a",
}


def test_other_units_are_refused_on_all_ranks() -> None:
    with nothing_is_left(current_session().marker):
        found = run_ranks(2, shared_start.run_with_other_units, env=SHM)
    assert set(found[0]) == {*DIFFERENCES, "order of calls"}
    for kind, part in DIFFERENCES.items():
        for result in found:
            assert result[kind].startswith("SharedMemoryError: ranks of one shard group have different units"), kind
        assert found[0][kind] == found[1][kind]
        assert part in found[0][kind], found[0][kind]
    # The order in which units were made is none of theirs.
    assert [result["order of calls"] for result in found] == ["runs", "runs"]


# A shortage: what the message says of it and of the way out.
SAID = {
    "host": ("this host has 1.0 MiB left", "free some"),
    "control group": ("the control group of this job has 2.0 MiB left", "free some"),
    "file size": ("(ulimit -f) is 3.0 MiB", "raise it"),
    "address space": ("(ulimit -v)",),
}


def test_transports_that_differ_by_rank_are_refused() -> None:
    for text in run_ranks(2, shared_start.run_with_other_transport):
        assert text.startswith("ConfigurationError: ranks of one shard group were asked for different transports"), text


def test_a_rank_that_cannot_open_files_is_named() -> None:
    for text in run_ranks(2, shared_start.start_without_descriptors, env=SHM):
        assert text.startswith(f"SharedMemoryError: rank {FAILING_RANK}: asking the kernel where this rank runs"), text
        assert "(ulimit -n)" in text


@pytest.mark.parametrize("odd", [0, 1])
def test_a_shortage_is_an_error_at_start_on_all_ranks(odd: int) -> None:
    with nothing_is_left(current_session().marker):
        found = run_ranks(2, shared_start.start_with_shortages, env=SHM, odd=odd)
    for result in found:
        for kind, parts in SAID.items():
            text = result[kind]
            assert text.startswith(f"SharedMemoryError: rank {odd}: "), text
            assert " MiB of shared memory" in text
            assert 'transport="c10d"' in text
            for part in parts:
                assert part in text, text
            assert result[f"left by {kind}"] == []
        assert result["afterwards"] == ["shm", 2]


@pytest.mark.skipif(TORCH < (2, 8), reason="groups of a mesh do not take the time limit of the default group")
@pytest.mark.parametrize(
    "widths", [(6, 6), pytest.param((6, 300), marks=pytest.mark.full)], ids=["equal sizes", "other sizes"]
)
@pytest.mark.parametrize("orders", [("ab", "ba"), ("ab", "a"), ("ab", "b")], ids="-".join)
def test_another_order_is_refused_and_never_a_wrong_sum(
    orders: tuple[str, str], widths: tuple[int, int], tmp_path: Path
) -> None:
    with nothing_is_left(current_session().marker):
        found = run_ranks(
            2,
            shared_start.run_in_other_order,
            env=SHM,
            orders=orders,
            widths=widths,
            timeout_s=1.5,
            directory=str(tmp_path),
        )
    print(*(end.error for end, _ in found), sep="\n")
    assert all(end.how == "raised" for end, _ in found), found
    assert any(end.error.startswith("PeerError: ") for end, _ in found), found


def test_gradients_of_other_sizes_are_refused(tmp_path: Path) -> None:
    found = run_ranks(2, shared_start.freeze_on_one_rank, env=SHM, timeout_s=5.0, directory=str(tmp_path))
    for rank, end in enumerate(found):
        assert end.error.startswith(f"PeerError: in backward, rank {rank} reduces gradients of unit layers.b"), end
        assert "requires_grad" in end.error


def test_a_job_that_was_killed_leaves_nothing_and_the_next_one_starts(tmp_path: Path) -> None:
    with nothing_is_left(current_session().marker):
        found = run_ranks(
            2,
            shared.train_and_fail,
            env=SHM,
            phase="backward",
            how="kill",
            replicate=1,
            shard=2,
            residence="private",
            timeout_s=60.0,
            directory=str(tmp_path),
            failing=[0, FAILING_RANK],
        )
        assert [end.how for end, _ in found] == ["killed", "killed"]
    assert len(run_ranks(2, shared.losses_after, env=SHM, steps=1, replicate=1, shard=2)) == 2


def test_two_jobs_on_one_host_do_not_see_one_another() -> None:
    alone = run_ranks(2, shared.losses_after, env=SHM, steps=3, replicate=1, shard=2)
    assert run_ranks(4, shared_start.two_jobs_at_once, env=SHM, steps=3) == alone * 2


def test_two_roots_share_nothing() -> None:
    alone = [run_ranks(2, shared_start.one_root, env=SHM, steps=3, first=first) for first in (0, 1)]
    for rank, found in enumerate(run_ranks(2, shared_start.two_roots, env=SHM, steps=3)):
        assert found["losses"] == [alone[0][rank], alone[1][rank]]
        assert (found["both"], found["one"]) == (2, 1)
        assert found["closed"] == 2, "the descriptor of the segment, and that of its mapping"
