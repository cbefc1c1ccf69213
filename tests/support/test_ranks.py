"""`run_ranks`: results, environment, and every way in which a rank can fail."""

from __future__ import annotations

import importlib.util
import os
import time

import pytest

from tests.support import RanksFailedError, cases, run_ranks
from tests.support.processes import marked_processes
from tests.support.ranks import current_session


def living_marked_processes() -> set[int]:
    return set(marked_processes(current_session().marker))


def test_results_come_back_by_rank() -> None:
    results = run_ranks(3, cases.sum_of_ranks, weight=2, env={"EXTRA": "given"})
    assert [float(result["sum"]) for result in results] == [6.0, 6.0, 6.0]
    assert [result["environment"]["RANK"] for result in results] == ["0", "1", "2"]
    assert [result["environment"]["LOCAL_RANK"] for result in results] == ["0", "1", "2"]
    for result in results:
        assert result["environment"]["WORLD_SIZE"] == result["environment"]["LOCAL_WORLD_SIZE"] == "3"
        assert result["environment"]["EXTRA"] == "given"
        assert result["group"] == result["pid"], "each rank leads a process group of its own"
    assert len({result["pid"] for result in results}) == 3


def test_environment_of_one_case_does_not_reach_the_next() -> None:
    run_ranks(1, cases.sum_of_ranks, weight=1, env={"EXTRA": "given"})
    assert run_ranks(1, cases.sum_of_ranks, weight=1)[0]["environment"]["EXTRA"] is None


def test_what_ranks_print_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, cases.print_rank)
    shown = capsys.readouterr().out
    assert "printed by rank 0" in shown
    assert "printed by rank 1" in shown


def test_a_case_costs_no_imports() -> None:
    run_ranks(2, cases.print_rank)
    started = time.monotonic()
    for _ in range(3):
        run_ranks(2, cases.print_rank)
    assert (time.monotonic() - started) / 3 < 6.0, "an import of torch takes longer on a machine that is this slow"


def test_failing_rank_brings_its_peers_down_at_once() -> None:
    before = living_marked_processes()
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"failed on ranks \[1\]") as failure:
        run_ranks(3, cases.raise_on, ranks=[1])
    assert time.monotonic() - started < 50.0, "at once, and not at the limit of a case"
    report = failure.value.reports[1]
    assert report.state == "failed"
    assert report.exit_code == 1
    assert "ValueError: rank 1 was told to fail" in report.error
    assert "about to fail" in report.output
    assert "ValueError: rank 1 was told to fail" in str(failure.value)
    assert not failure.value.timed_out
    assert living_marked_processes() - before <= living_zygotes()


def living_zygotes() -> set[int]:
    """Zygotes stay between cases; nothing else may."""
    from tests.support.processes import command_line

    return {pid for pid in living_marked_processes() if "tests.support.zygote" in command_line(pid)}


def test_every_failing_rank_is_reported() -> None:
    with pytest.raises(RanksFailedError, match=r"failed on ranks \[0, 2\]") as failure:
        run_ranks(3, cases.raise_on, ranks=[0, 2])
    assert "rank 0 was told to fail" in str(failure.value)
    assert "rank 2 was told to fail" in str(failure.value)


def test_hanging_ranks_are_stopped_and_show_where_they_hung() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="did not finish within 1 s") as failure:
        run_ranks(2, cases.hang, timeout=1.0)
    assert time.monotonic() - started < 50.0, "the ranks would sleep for longer"
    assert failure.value.timed_out
    for report in failure.value.reports:
        assert report.state == "stopped"
        assert "function_that_hangs" in report.output


def test_rank_killed_by_a_signal_is_reported() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, cases.die_on, failing_rank=1)
    assert failure.value.reports[1].state == "died"
    assert failure.value.reports[1].exit_code == -9
    assert failure.value.reports[0].state == "stopped"


@pytest.mark.parametrize(("code", "expected"), [(3, 3), ("a sentence", 1)])
def test_exit_code_is_reported(code: int | str, expected: int) -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, cases.exit_on, failing_rank=0, code=code)
    assert failure.value.reports[0].state == "failed"
    assert failure.value.reports[0].exit_code == expected
    assert repr(code) in failure.value.reports[0].error


@pytest.mark.parametrize("code", [0, None])
def test_exit_without_error_is_a_result(code: int | None) -> None:
    assert run_ranks(2, cases.exit_on, failing_rank=0, code=code) == [None, 1]


def test_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="define it at module level"):
        run_ranks(1, lambda: None)


def test_process_left_behind_fails_the_case_and_is_ended() -> None:
    before = living_marked_processes()
    with pytest.raises(RanksFailedError, match=r"left processes behind.*time\.sleep") as failure:
        run_ranks(1, cases.leave_a_daemon_behind)
    assert failure.value.left_behind
    assert living_marked_processes() - before <= living_zygotes()


@pytest.mark.parametrize("then", ["return", "raise", "hang"])
def test_spawn_manager_does_not_outlive_its_rank(then: str) -> None:
    before, memory = living_marked_processes(), set(os.listdir("/dev/shm"))
    if then == "return":
        run_ranks(1, cases.start_manager, pid_file=None, then=then)
    else:
        with pytest.raises(RanksFailedError):
            run_ranks(1, cases.start_manager, pid_file=None, then=then, timeout=60.0 if then == "raise" else 3.0)
    assert living_marked_processes() - before <= living_zygotes()
    # Blocks of resource-tracked shared memory are named psm_*; other users of the machine may add other names.
    assert not {name for name in set(os.listdir("/dev/shm")) - memory if name.startswith("psm_")}


def test_megatron_flavour_has_the_training_package_loaded() -> None:
    # Looked for, not imported: that takes seconds.
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs the megatron extra")
    assert run_ranks(2, cases.loaded_modules, names=["megatron.training"], flavour="megatron") == [[True], [True]]


def test_core_flavour_does_not_know_megatron() -> None:
    assert run_ranks(1, cases.loaded_modules, names=["torch", "megatron"]) == [[True, False]]
