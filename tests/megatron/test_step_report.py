"""A job says what it waited for and sent, in its log and as scalars, alike on every rank that has to reduce for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.megatron import step_report
from tests.megatron import reported
from tests.megatron.cases import tiny_job
from tests.support import run_ranks


def counters(**seconds: float) -> Counters:
    found = Counters(all_gather_bytes=100, reduce_scatter_bytes=50, all_reduce_bytes=7, owner_reduction_bytes=2)
    for cause, value in seconds.items():
        found.waits[cause].seconds = value
    return found


def test_bytes_are_summed_by_tier_and_waits_by_cause_over_chunks() -> None:
    found = step_report.totals([counters(all_gather=0.5), counters(all_gather=0.25, ring=1.0)])
    assert (found["intra_bytes"], found["inter_bytes"]) == (300, 18)
    assert (found["wait/all_gather"], found["wait/ring"], found["wait/window"]) == (0.75, 1.0, 0.0)
    assert list(found) == list(step_report.totals([])), "ranks reduce the same names in the same order"


def test_a_window_gives_means_and_starts_over() -> None:
    window = step_report.Window()
    window.add({"seconds": 1.0, "intra_bytes": 10})
    window.add({"seconds": 3.0, "intra_bytes": 30})
    assert window.means() == {"seconds": 2.0, "intra_bytes": 20}
    window.add({"seconds": 5.0, "intra_bytes": 7})
    assert window.means() == {"seconds": 5.0, "intra_bytes": 7}


def test_waits_of_a_lane_are_named_but_no_part_of_the_share() -> None:
    means = {**step_report.totals([counters(all_gather=0.01, peers=0.9)]), "seconds": 0.1}
    line = step_report.log_line(20, means)
    assert line.startswith("hyperfsdp iteration 20: train step 100.0 ms, of it waiting 10.0 % ")
    assert "(all_gather 10.0 ms, peers 900.0 ms beside)" in line
    assert line.endswith("intra-supernode 150 B | inter-supernode 9 B")


def test_every_cause_is_a_scalar() -> None:
    scalars = step_report.named_scalars({**step_report.totals([counters(window=0.002)]), "seconds": 0.5})
    assert scalars["hyperfsdp/wait-ms/window"] == pytest.approx(2.0)
    assert scalars["hyperfsdp/train-step-ms"] == 500
    assert {f"hyperfsdp/wait-ms/{cause.value}" for cause in WaitCause} < set(scalars)
    assert scalars["hyperfsdp/intra-bytes"] == 150


def test_a_model_in_another_wrapper_is_left_alone() -> None:
    def stock(forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any) -> str:
        return "stepped"

    assert step_report.report_steps(stock)(None, None, [SimpleNamespace()], None) == "stepped"


def test_a_job_reports_at_its_intervals(corpus: list[str], tmp_path: Any) -> None:
    arguments = "--train-iters 5 --log-interval 2 --tensorboard-log-interval 2 --use-hyperfsdp"
    more = ["--hyperfsdp-supernode-size", "2", "--tensorboard-dir", str(tmp_path)]
    argv = [*tiny_job(*arguments.split(), *more), *corpus]
    ranks = run_ranks(4, reported.train, flavour="megatron", timeout=90.0, argv=argv)
    assert [bool(rank["lines"]) for rank in ranks] == [False, False, False, True]
    last = ranks[-1]
    assert [line.partition(":")[0] for line in last["lines"]] == ["hyperfsdp iteration 2", "hyperfsdp iteration 4"]
    assert all("of it waiting" in line and "inter-supernode" in line for line in last["lines"])
    crossing = last["scalars"]["hyperfsdp/inter-bytes"]
    assert list(crossing) == [2, 4]
    # Two micro-batches, one reduction: this rank's half of the gradients, in fp32.
    half = last["numel"] * 4 / 2
    assert all(half <= value <= half * 1.01 for value in crossing.values()), (crossing, half)
    assert last["scalars"]["hyperfsdp/intra-bytes"][4] > 4 * half
    assert last["scalars"]["hyperfsdp/train-step-ms"][4] > 0
