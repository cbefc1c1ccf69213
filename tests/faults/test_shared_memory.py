"""Ranks that share memory and one of them fails: the others say so, soon, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.faults import shared
from tests.faults.cases import FAILING_RANK
from tests.faults.watched import End, nothing_is_left
from tests.support import run_ranks
from tests.support.ranks import current_session

SHM = {TRANSPORT_VARIABLE: "shm"}
SOON_S = 3.0
"""Seconds until a dead rank is noticed: a tenth by design, and as much again for a busy machine as suffices."""
TIMEOUT_S = 2.0
PHASES = ("set-up", "forward", "backward", "lane", "step", "between steps")
ROOT = "root"
# A phase: what the peer may be waiting for when it notices. A rank that dies takes what its lanes had not yet done with
# it, so in backward that may be gradients of a unit before the one that it died in.
WAITS = {
    "set-up": ("to set up shared memory, before the first gather of a model",),
    "forward": ("to publish its parameters of unit blocks.1",),
    "backward": (
        "to write its gradients of unit blocks.",
        "to add up earlier gradients, in backward of unit blocks",
    ),
    "lane": ("gradients", "parameters of unit", "last use of unit"),
    "step": (f"to publish its parameters of unit {ROOT}",),
    "inside the step": (f"to publish its parameters of unit {ROOT}",),
    "between steps": (f"to publish its parameters of unit {ROOT}",),
}


def fail_in(
    phase: str, how: str, mesh: tuple[int, int], directory: Path, *, residence: str = "private"
) -> tuple[list[End], float]:
    """How all ranks ended, and when the failing one failed."""
    with nothing_is_left(current_session().marker):
        found = run_ranks(
            mesh[0] * mesh[1],
            shared.train_and_fail,
            env=SHM,
            phase=phase,
            how=how,
            replicate=mesh[0],
            shard=mesh[1],
            residence=residence,
            timeout_s=TIMEOUT_S if how == "stop" else 60.0,
            directory=str(directory),
            failing=[FAILING_RANK],
        )
    moments = [failed for _, failed in found if failed is not None]
    assert len(moments) == 1, found
    return [end for end, _ in found], moments[0]


def check_survivor(end: End, phase: str, how: str) -> None:
    """The one that shared memory with the failing rank."""
    assert end.how == "raised", end
    assert end.error.startswith("PeerError: "), end.trace
    assert f"for rank {FAILING_RANK} to " in end.error
    assert any(each in end.error for each in WAITS[phase]), end.error
    if phase != "set-up":
        assert "of unit " in end.error
        assert f"ank {FAILING_RANK} {'lives' if how == 'stop' else 'has ended'}" in end.error


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
@pytest.mark.parametrize("phase", PHASES)
def test_the_peer_names_rank_unit_and_phase(phase: str, how: str, tmp_path: Path) -> None:
    ends, failed = fail_in(phase, how, (1, 2), tmp_path)
    assert ends[FAILING_RANK].how == {"kill": "killed", "stop": "stopped"}[how]
    check_survivor(ends[0], phase, how)
    assert ends[0].at - failed < SOON_S + (TIMEOUT_S if how == "stop" else 0.0)


@pytest.mark.parametrize("phase", ["inside the step", pytest.param("backward", marks=pytest.mark.full)])
def test_with_aliased_shards_it_is_the_same(phase: str, tmp_path: Path) -> None:
    ends, failed = fail_in(phase, "kill", (1, 2), tmp_path, residence="aliased")
    assert ends[FAILING_RANK].how == "killed"
    check_survivor(ends[0], phase, "kill")
    assert ends[0].at - failed < SOON_S


@pytest.mark.parametrize("phase", ["backward", "lane"])
def test_a_rank_that_raises_is_one_that_has_ended(phase: str, tmp_path: Path) -> None:
    ends, failed = fail_in(phase, "raise", (1, 2), tmp_path)
    assert ends[FAILING_RANK].how == "raised"
    assert "ArithmeticError: injected" in ends[FAILING_RANK].error, ends[FAILING_RANK].trace
    check_survivor(ends[0], phase, "raise")
    assert ends[0].at - failed < SOON_S


def test_a_stopped_rank_is_given_the_timeout_of_the_group(tmp_path: Path) -> None:
    ends, failed = fail_in("backward", "stop", (1, 2), tmp_path)
    assert ends[FAILING_RANK].how == "stopped"
    check_survivor(ends[0], "backward", "stop")
    assert TIMEOUT_S <= ends[0].at - failed < TIMEOUT_S + SOON_S


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "phase", [pytest.param(each, marks=() if each == "backward" else pytest.mark.full) for each in PHASES]
)
def test_between_supernodes_every_rank_ends(phase: str, how: str, tmp_path: Path) -> None:
    ends, failed = fail_in(phase, how, (2, 2), tmp_path)
    survivors = [end for rank, end in enumerate(ends) if rank != FAILING_RANK]
    assert [end.how for end in survivors] == ["raised"] * 3, ends
    for end in survivors:
        # gloo, whose messages cross between supernodes, speaks of connections and of its own timeouts
        assert "PeerError: " in end.error or "onnection" in end.error or "imed out" in end.error, end.trace
        assert end.at - failed < SOON_S + (TIMEOUT_S if how == "stop" else 0.0) * 2
    assert any("PeerError: " in end.error for end in survivors), ends


def test_of_four_ranks_the_dead_one_is_named(tmp_path: Path) -> None:
    ends, failed = fail_in("backward", "kill", (1, 4), tmp_path)
    for rank in (0, 2, 3):
        assert ends[rank].at - failed < SOON_S
        assert "PeerError: " in ends[rank].error
    assert any(f"rank {FAILING_RANK} has ended" in ends[rank].error for rank in (0, 2, 3)), ends
