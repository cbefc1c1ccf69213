"""The collectives benchmark: exact results are demanded, times are of the slowest rank, floors in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.collectives import command, worker
from bench.collectives.command import MIB, calls_of, fill, floor_bytes
from bench.collectives.variants import C10D, GLOO, SHM, SUM
from bench.collectives.worker import MEMCPY, Plan, Time
from bench.errors import UnavailableError
from bench.report import Report
from hp_plugin.core.kernels import NativeStatus, native_status
from tests.support import init_gloo
from tests.support.ranks import RanksFailedError, run_ranks

needs_native = pytest.mark.skipif(native_status().library is None, reason="the native library is missing")

# ---- on ranks -------------------------------------------------------------------------------------------------------


def _measure() -> list[tuple[int, str, str, int, float]]:
    init_gloo()
    plans = (Plan(4096, rounds=2, calls=3), Plan(1 << 16, rounds=1, calls=1))
    return [(t.nbytes, t.operation, t.variant, t.round, t.seconds) for t in worker.measure(plans=plans)]


@needs_native
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_variant_is_checked_and_timed_in_every_round(ranks: int) -> None:
    for times in run_ranks(ranks, _measure):
        found = {tuple(entry[:4]) for entry in times}
        expected = set()
        for nbytes, rounds in ((4096, 2), (1 << 16, 1)):
            for index in range(rounds):
                expected |= {(nbytes, "all_gather", name, index) for name in (SHM, C10D, GLOO)}
                expected |= {(nbytes, "reduce_scatter", name, index) for name in (SHM, C10D, GLOO, SUM)}
                expected.add((nbytes, "memcpy", MEMCPY, index))
        assert found == expected
        assert len(times) == len(expected)
        assert all(entry[4] > 0 for entry in times)


def _lose(method: str) -> None:
    """Rank 1 forgets its shard, or adds up what it had before."""
    from bench.collectives import variants

    init_gloo()
    if torch.distributed.get_rank() == 1:
        original = getattr(variants.OursShm, method)

        def broken(variant: Any) -> None:
            variant.shard.zero_()
            variant.gradient.zero_()
            original(variant)

        setattr(variants.OursShm, method, broken)
    worker.measure(plans=(Plan(4096, rounds=1, calls=1),))


@needs_native
@pytest.mark.parametrize("method", ["all_gather", "reduce_scatter"])
def test_a_wrong_result_ends_the_benchmark(method: str) -> None:
    with pytest.raises(RanksFailedError, match=rf"{method} of ours_shm(_sum)? is wrong: element"):
        run_ranks(2, _lose, method=method)


def _slow() -> list[float]:
    """Times of a call of which rank 1's takes 20 ms, and of none."""
    import time

    init_gloo()
    is_late = torch.distributed.get_rank() == 1
    return [worker._timed(lambda: time.sleep(0.02 * is_late), 3), worker._timed(lambda: None, 3)]


def test_a_time_is_of_one_call_on_one_rank() -> None:
    first, second = run_ranks(2, _slow)
    assert first[0] < 0.01 < second[0] < 0.1
    assert second[1] < 0.01


# ---- the report -----------------------------------------------------------------------------------------------------


def test_floors_count_what_must_be_read_and_written() -> None:
    assert floor_bytes("all_gather", 400, 4) == 100
    # 300 copied, the own slice not; 4 slices of 100 read and one written are 500 bytes of traffic, as 250 copied ones
    assert floor_bytes("reduce_scatter", 400, 4) == 300 + 250
    assert floor_bytes("reduce_scatter", 400, 2) == 200 + 300


def test_large_operands_are_called_less_often() -> None:
    assert [calls_of(mib) for mib in (1, 4, 16, 64, 1024)] == [20, 20, 8, 2, 2]


def times_of(rank: int, plan: Plan) -> list[Time]:
    """Rank 1 is slower by half than rank 0; each round is slower than the one before."""
    seconds = {
        "memcpy": {MEMCPY: 4.0},
        "all_gather": {SHM: 2.0, C10D: 10.0, GLOO: 40.0},
        "reduce_scatter": {SHM: 8.0, C10D: 16.0, GLOO: 32.0, SUM: 1.0},
    }
    return [
        Time(plan.nbytes, operation, name, index, value * (1 + index) * (1.5 if rank else 1.0))  # type: ignore[arg-type]
        for index in range(plan.rounds)
        for operation, by_name in seconds.items()
        for name, value in by_name.items()
    ]


def filled(*groups: int) -> Report:
    plan = Plan(16 * MIB, rounds=3, calls=1)
    report = Report("collectives")
    for ranks in groups:
        fill(report, ranks, [plan], [times_of(rank, plan) for rank in range(ranks)])
    return report


def test_keys_without_a_number_of_ranks_are_those_of_four() -> None:
    report = filled(4, 2)
    assert report.ratios["all_gather_16mb_vs_gloo"] == pytest.approx(2 / 40)
    assert report.ratios["all_gather_16mb_vs_c10d"] == pytest.approx(2 / 10)
    assert report.ratios["reduce_scatter_16mb_vs_gloo"] == pytest.approx(8 / 32)
    assert report.ratios["reduce_scatter_16mb_sum_vs_gloo"] == pytest.approx(1 / 32)
    assert {key for key in report.ratios if "_2_ranks" not in key} == set(filled(4).ratios)
    assert "all_gather_16mb_vs_gloo" not in filled(2).ratios
    assert set(report.quartiles) == set(report.ratios)


def test_rows_are_of_the_slowest_rank() -> None:
    report = filled(4)
    rows = {(row["operation"], row["variant"]): row for row in report.rows}
    assert len(rows) == len(report.rows) == 7
    row = rows["all_gather", SHM]
    assert row["ms"] == pytest.approx(2.0 * 2 * 1.5 * 1e3), "the median of three rounds, of the slow ranks"
    assert row["gb_per_s"] == pytest.approx(16 * MIB * 3 / 4 / 6.0 / 1e9)
    assert row["floor_ms"] == pytest.approx(4.0 * 2 * 1.5 * 1e3 / 4)
    assert row["over_floor"] == pytest.approx(2.0)
    assert rows["reduce_scatter", SHM]["vs_gloo"] == pytest.approx(0.25)
    assert report.environment["memcpy_gb_per_s"] == {"16 MiB, 4 ranks at once": pytest.approx(16 * MIB / 12.0 / 1e9)}
    assert len(report.rounds) == 2 * 3
    assert report.rounds[0]["memcpy_s"] == pytest.approx(6.0)
    report.to_json()


# ---- what cannot be run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": "1,big"}, "--sizes"),
        ({"sizes": "0"}, "--sizes"),
        ({"ranks": "1"}, "at least 2"),
        ({"ranks": "3"}, "do not divide evenly"),
    ],
)
@needs_native
def test_options_that_make_no_sense_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        command.benchmark(**options)  # type: ignore[arg-type]


def test_a_missing_native_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeStatus(library=None, reason="There is no file libhp_native.so.")
    monkeypatch.setattr(command, "native_status", lambda: missing)
    with pytest.raises(UnavailableError, match="There is no file"):
        command.benchmark(quick=True)
