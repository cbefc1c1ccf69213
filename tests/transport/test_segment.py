"""A segment is one memory for all ranks, without a name, for ranks of the job alone, and gone when nobody uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.watched import nothing_is_left
from tests.support import run_ranks
from tests.support.ranks import current_session
from tests.transport import segment_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_see_one_memory_without_a_name(ranks: int) -> None:
    with nothing_is_left(current_session().marker):
        results = run_ranks(ranks, segment_ranks.write_and_read, nbytes=300_000)
    for found in results:
        assert found["nbytes"] == 303_104, "whole pages"
        assert found["zero at first"]
        assert found["all is seen"]
        assert found["empty"] == 0
        assert found["alive"] == [True] * (ranks - 1)
        assert found["new names"] == []
        assert found["new descriptors"] == 2, "the segment's, and that of its mapping"
        assert not any(found["inherited"])
    assert len({frozenset(found["memory files"]) for found in results}) == 1
    assert [name.split()[:2] for name in results[0]["memory files"]] == [["memory", "file"]], "and no socket"


def test_memory_is_mapped_until_the_last_tensor_is_gone() -> None:
    for found in run_ranks(2, segment_ranks.write_and_read, nbytes=8192):
        assert found["tensor outlives the segment"]
        assert found["mapped while a tensor lives"] == found["memory files"]
        assert found["after the last tensor"] == []
        assert found["descriptors after"] == 0


@pytest.mark.parametrize(
    ("as_user", "token"),
    [
        pytest.param(
            65534, b"the right one", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
        ),
        (None, b""),
        (None, b"x"),
        (None, b"x" * 16),
    ],
    ids=["another user", "silent", "short token", "wrong token"],
)
def test_a_stranger_who_connects_first_gets_nothing_and_breaks_nothing(as_user: int | None, token: bytes) -> None:
    with nothing_is_left(current_session().marker):
        results = run_ranks(3, segment_ranks.share_among_strangers, as_user=as_user, token=token, timeout=40.0)
    assert [found["words"] for found in results] == [[1, 2, 3]] * 3
    assert [found["stranger"] for found in results] == ["got nothing", None, None]


# The first rank opens a socket, the memory file and a connection; another one a socket and the file.
@pytest.mark.parametrize(("odd", "spare"), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
def test_too_few_descriptors_are_an_error_on_all_ranks(odd: int, spare: int) -> None:
    with nothing_is_left(current_session().marker):
        results = run_ranks(2, segment_ranks.make_with_few_descriptors, odd=odd, spare=spare, timeout=30.0)
    for found in results:
        assert found["told"].startswith(f"SharedMemoryError: rank {odd}: "), found
        assert "(ulimit -n)" in found["told"]
        assert found["left"] == []
        assert found["then"] == "runs"


def test_a_rank_without_the_native_library_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(2, segment_ranks.make_without_library, odd=1):
        assert text.startswith("SharedMemoryError: rank 1: shared memory needs the native library"), text


def test_a_rank_that_ends_before_the_segment_is_made_is_an_error_of_the_others(tmp_path: Path) -> None:
    with nothing_is_left(current_session().marker):
        ends = run_ranks(3, segment_ranks.leave_before_agreeing, directory=str(tmp_path), ranks=3)
    assert ends[2].how == "killed"
    for rank, others in ((0, "ranks 1 and 2"), (1, "ranks 0 and 2")):
        assert f"PeerError: rank {rank} waited for {others} to set up shared memory" in ends[rank].error, ends[rank]
