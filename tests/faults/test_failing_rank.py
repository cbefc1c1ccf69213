"""A rank that fails in the middle of a training step ends the job soon, with the reason, and leaves nothing behind."""

from __future__ import annotations

import os
import time

import pytest

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.faults import cases
from tests.support import RanksFailedError, run_ranks
from tests.support.processes import command_line, marked_processes
from tests.support.ranks import current_session

TRANSPORTS = pytest.mark.parametrize("transport", ["c10d", "shm"])


def leftovers() -> set[str]:
    processes = {f"{pid} {command_line(pid)}" for pid in marked_processes(current_session().marker)}
    memory = {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "torch_", "hp_"))}
    return {each for each in processes if "tests.support.zygote" not in each} | memory


@TRANSPORTS
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_failure_in_backward_ends_all_ranks(how: str, transport: str) -> None:
    before = leftovers()
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(4, cases.train_with_failure, env={TRANSPORT_VARIABLE: transport}, how=how, timeout_s=60.0)
    assert time.monotonic() - started < 50.0
    report = failure.value.reports[cases.FAILING_RANK]
    if how == "raise":
        assert report.state == "failed"
        assert "ArithmeticError: injected into backward" in report.error
    else:
        assert report.state == "died"
        assert report.exit_code == -9
    assert all(each.state in ("failed", "stopped", "died") for each in failure.value.reports)
    assert leftovers() <= before


@TRANSPORTS
def test_stalled_rank_makes_its_peers_fail_within_the_timeout(transport: str) -> None:
    before = leftovers()
    env = {TRANSPORT_VARIABLE: transport}
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(4, cases.train_with_failure, env=env, how="stall", timeout_s=3.0, timeout=60.0)
    assert not failure.value.timed_out, "the peers' collectives should have given up first"
    assert failure.value.reports[cases.FAILING_RANK].state == "stopped"
    assert "_fail" in failure.value.reports[cases.FAILING_RANK].output, "the stalled rank's stack is shown"
    says = {"c10d": "imed out", "shm": "the timeout of the process group, for rank 1 to"}[transport]
    assert any(says in report.error for report in failure.value.reports)
    assert leftovers() <= before


def test_the_next_case_is_not_affected() -> None:
    with pytest.raises(RanksFailedError):
        run_ranks(4, cases.train_with_failure, how="kill", timeout_s=60.0)
    assert (
        len(run_ranks(2, cases.memory_after_backward, replicate=1, shard=2, reshard=True, reshard_after_backward=True))
        == 2
    )
