"""Counters of a segment: waits name who is behind, notice who has ended, and give up after the timeout."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support import run_ranks
from tests.transport import signal_ranks


def test_a_wait_names_the_rank_that_is_behind_as_the_job_calls_it() -> None:
    results = run_ranks(4, signal_ranks.wait_for_the_one_behind)
    assert results[1]["told"] == (
        "PeerError: rank 1 waited 0 s, the timeout of the process group, for rank 3 to do its part of unit u in "
        "forward. Rank 3 lives: it is stopped, stuck, or in another place of the program"
    )
    assert 0.5 <= results[1]["after"] < 5.0
    assert "for rank 3 to do something. Rank 3 lives" in results[3]["own alone"], "it waits for itself alone"


def test_a_dead_rank_is_noticed_within_a_second_also_behind_one_that_lives(tmp_path: Path) -> None:
    results = run_ranks(4, signal_ranks.wait_for_one_that_ends, directory=str(tmp_path), ranks=4, does_its_part=False)
    ends = [end for end, _ in results]
    ended_at = results[0][1]
    assert ends[3].how == "killed"
    for rank, end in enumerate(ends[:3]):
        # Who notices ends too, and may be named by who looks a moment later.
        assert end.error.startswith(f"PeerError: rank {rank} waited for rank"), end
        assert "to do its part of unit u in forward, but rank" in end.error
        assert re.search(r"(rank|and) 3 ha(s|ve) ended$", end.error), end.error
    assert max(end.at for end in ends[:3]) - ended_at < 1.0 + 1.0, "a second, and what a busy machine adds"


def test_a_rank_that_did_its_part_may_end(tmp_path: Path) -> None:
    results = run_ranks(3, signal_ranks.wait_for_one_that_ends, directory=str(tmp_path), ranks=3, does_its_part=True)
    assert [end.how for end, _ in results] == ["returned", "returned", "killed"], results


def test_a_rank_may_do_its_part_and_end_between_two_looks() -> None:
    assert run_ranks(2, signal_ranks.end_between_two_looks)[0]["told"] == "runs"


def test_counters_wrap_around() -> None:
    first, second = run_ranks(2, signal_ranks.wrap_around)
    assert first == second
    assert first[0] < 1 << 32 < first[-1]


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGINT], ids=["SIGALRM", "Ctrl-C"])
def test_signals_are_handled_during_a_wait(number: signal.Signals) -> None:
    found = run_ranks(2, signal_ranks.interrupt_a_wait, number=int(number))[0]
    assert found["raised"] == ("_InterruptError" if number == signal.SIGALRM else "KeyboardInterrupt")
    assert 0.2 < found["after"] < 5.0


def test_a_wait_for_what_this_rank_itself_will_not_do_says_why() -> None:
    for rank, found in enumerate(run_ranks(2, signal_ranks.fail_on_the_lane)):
        assert found["peer"] == "PeerError: rank 9 has ended"
        assert found["other"] == f"PeerError: rank {rank} itself failed to add up gradients: ArithmeticError: a sum"
