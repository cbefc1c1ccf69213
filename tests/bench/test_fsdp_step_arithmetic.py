"""Bound, calibration, settings and sweep of the fsdp-step benchmark, without ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from bench.errors import UnavailableError
from bench.fsdp_step import command, recorded, results, settings
from bench.fsdp_step.bound import Schedule, schedule_of
from bench.fsdp_step.calibration import corrected_layer, drift
from bench.fsdp_step.job import Job, Result, Round
from bench.fsdp_step.pace import Pace, wait_until
from bench.fsdp_step.settings import FLOOR, OURS, OURS_ALIASED, OURS_C10D
from bench.report import Report
from tests.bench.fsdp_step_programs import tiny_job


def test_bound_of_a_link_that_is_always_busy_is_forward_first_unit_and_wire() -> None:
    # backward in reverse: ready at 6+2, 6+4, 6+6; the link needs 5 each: 13, 18, 23
    assert Schedule([2, 2, 2], [2, 2, 2], [5, 5, 5], optimizer=1).step() == 6 + 2 + 15 + 1


def test_bound_of_a_fast_link_is_compute_and_the_last_units_tail() -> None:
    assert Schedule([2, 2, 2], [4, 4, 4], [1, 1, 1], optimizer=0).step() == 6 + 12 + 1


def test_bound_counts_a_wait_of_the_link_between_units() -> None:
    # units in reverse: ready at 1, 11, 12; link: 1+2=3, 11+4=15, 15+3=18
    assert Schedule([0, 0, 0], [1, 10, 1], [3, 4, 2], optimizer=0.5).step() == 18.5


def test_bound_without_wire_is_compute() -> None:
    assert Schedule([1, 1], [2, 2], [0, 0], optimizer=3).step() == 9


def test_schedule_puts_the_rest_of_the_floor_where_it_says() -> None:
    schedule = schedule_of([10, 40, 40, 10], layer_s=1.0, forward_s=2.5, backward_s=5.0, optimizer_s=0.25, wire_s=10.0)
    assert list(schedule.forward) == [0.0, 1.0, 1.0, 0.5]
    assert list(schedule.backward) == pytest.approx([0.1, 2.4, 2.4, 0.1])
    assert list(schedule.wire) == pytest.approx([1.0, 4.0, 4.0, 1.0])
    assert sum(schedule.forward) + sum(schedule.backward) == pytest.approx(7.5), "nothing of the floor is lost"


def test_calibration_reaches_the_target_in_one_step_when_the_rest_is_constant() -> None:
    layers, rest, target = 16, 0.05, 0.44
    layer = corrected_layer(0.001, floor_s=3 * layers * 0.001 + rest, target_s=target, layers=layers)
    assert 3 * layers * layer + rest == pytest.approx(target)
    assert corrected_layer(0.001, floor_s=1.0, target_s=0.1, layers=2) == 0.0


def test_one_slow_round_is_no_drift() -> None:
    assert drift([0.2], rejected=[True]) is None
    assert drift([0.0, 0.2], rejected=[False, True]) is None
    assert drift([-0.1, 0.2], rejected=[True, True]) is None
    assert drift([0.3, 0.05], rejected=[True, True]) == 0.05


def test_a_wait_takes_its_time_and_is_counted() -> None:
    pace = Pace(layer_s=0.02)
    start = time.perf_counter()
    wait_until(pace.begin(0.5))
    wait_until(pace.begin(1.0))
    assert time.perf_counter() - start >= 0.03
    assert (pace.calls, pace.seconds) == (2, pytest.approx(0.03))


def test_the_committed_settings_hold_and_have_every_set_of_the_contract() -> None:
    loaded = settings.load()
    assert loaded.full.size.layers == 16
    assert loaded.full.rounds >= 10
    assert loaded.full.size == loaded.quick.size
    assert {"fsdp2_hook", "megatron_distopt", "no_pipeline"} <= {
        name for name_of_set in loaded.full.sets for name in loaded.sets[name_of_set]
    }


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("full", "round"), 3, "round"),
        (("variants", "torch_ddp", "option"), {}, "option"),
        (("full", "balances"), ["c3"], "c3"),
        (("sets", "fsdp2"), ["fsdp2", "fsdp3"], "fsdp3"),
        (("sets", "fsdp2"), ["fsdp2", "fsdp2_tuned", "fsdp2_hook", "torch_ddp"], "at most 5"),
        (("full", "size", "heads"), 3, "heads"),
    ],
)
def test_settings_refuse_what_they_do_not_know(tmp_path: Path, path: tuple[str, ...], value: object, said: str) -> None:
    data = yaml.safe_load(settings.SETTINGS_FILE.read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(UnavailableError, match=said):
        settings.load(file)


def test_a_delay_has_its_own_options() -> None:
    loaded = settings.load()
    assert loaded.options_of(settings.OURS, delay_ms=5.0) == loaded.delayed[settings.OURS]
    assert loaded.options_of("torch_ddp", delay_ms=5.0) == loaded.variants["torch_ddp"].options


def test_sweep_complains_about_options_that_are_clearly_worse() -> None:
    loaded = settings.load()
    record = {
        name: {"candidates": [{"options": options, "over_compute": 2.0} for options in own.sweep]}
        for name, own in loaded.variants.items()
        if own.sweep
    }
    assert recorded.complaints(loaded, record) == []
    other = next(
        i
        for i, c in enumerate(record["torch_ddp"]["candidates"])
        if c["options"] != loaded.variants["torch_ddp"].options
    )
    record["torch_ddp"]["candidates"][other]["over_compute"] = 1.9
    assert [line.split(":")[0] for line in recorded.complaints(loaded, record)] == ["torch_ddp"]
    del record["hyperfsdp"]
    assert any("no figures" in line for line in recorded.complaints(loaded, record))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transport": "symm_mem"}, "auto, c10d, shm"),
        ({"compute": "imagined"}, "modelled or real"),
        ({"supernodes": "2"}, "2x2"),
        ({"supernodes": "0x2"}, "2x2"),
        ({"peers": "fsdp3"}, "fsdp3"),
        ({"balances": "c9"}, "c9"),
        ({"link": "fast"}, "fast"),
    ],
)
def test_the_command_refuses_what_it_cannot_run(options: dict[str, str], said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        command.benchmark(**options)  # type: ignore[arg-type]


# ---- our transports -------------------------------------------------------------------------------------------------


def plan_of(transport: str) -> command.Plan:
    return command._plan(True, transport, "modelled", "1gbit", 0.0, "2x2")


@pytest.mark.parametrize("transport", ["auto", "c10d", "shm"])
def test_ours_and_its_ablations_have_the_transport_that_is_asked_for(transport: str) -> None:
    plan = plan_of(transport)
    asked = {name: plan.variant(name).options.get("transport") for name in (OURS, "no_pipeline", "no_fused_reduce")}
    assert set(asked.values()) == {transport}
    assert plan.variant(OURS_C10D).options == {**plan.variant(OURS).options, "transport": "c10d"}
    aliased = {**plan.variant(OURS).options, "transport": "shm", "residence": "aliased"}
    assert plan.variant(OURS_ALIASED).options == aliased
    assert plan.variant("no_zero_copy").options["transport"] == "c10d"
    assert "transport" not in plan.variant("torch_ddp").options
    assert plan.describe()["transport_asked_for"] == transport


def test_sweep_records_options_without_the_transport() -> None:
    plan = plan_of("shm")
    options = {"bucket_bytes": 1}
    assert plan.in_force(OURS, options) == {"transport": "shm", "bucket_bytes": 1}
    assert options == {"bucket_bytes": 1}


def test_options_swept_with_another_transport_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded.read_record()
    record[OURS]["conditions"]["transport_asked_for"] = "shm"
    monkeypatch.setattr(results, "read_record", lambda: record)
    said = f"{OURS}: they were swept with the transport shm"
    assert said in results._about_options(plan_of("c10d"))
    assert said not in results._about_options(plan_of("shm"))


def test_what_is_held_against_the_c10d_transport_runs_beside_it() -> None:
    chosen = command._chosen_sets(plan_of("auto"), ["no_zero_copy", "fsdp2"])
    assert chosen == {"fsdp2": ["fsdp2"], "transports": [OURS_C10D, "no_zero_copy"]}
    assert command._chosen_sets(plan_of("auto"), ["no_pipeline"]) == {"ablations": ["no_pipeline"]}


def found_of(names: list[str]) -> tuple[Job, Result]:
    """One kept round in which variant `names[i]` takes i + 1 seconds, and CPU time of twice the square of that."""
    times = {name: float(place) for place, name in enumerate(names, start=1)}
    one = Round(
        kept=True,
        wire=1.0,
        layer=0.01,
        floor_phases=(0.3, 0.6, 0.1),
        times=times,
        host_cpu={name: 2 * seconds**2 for name, seconds in times.items()},
        link_bytes=dict.fromkeys(names, 1e6),
        packets=dict.fromkeys(names, 1.0),
    )
    facts = {OURS: {"transport": "shm"}, OURS_C10D: {"transport": "c10d"}}
    result = Result(rounds={"c1": [one]}, facts=facts, parameters=100, unit_sizes=[10, 80, 10])
    return tiny_job(names, compute="modelled"), result


def test_host_cpu_and_packing_are_held_against_ours_on_c10d() -> None:
    found = {"transports": found_of([FLOOR, OURS, OURS_C10D, "no_zero_copy"])}
    report = Report("fsdp-step")
    results._add_ratios(report, "c1", found)
    assert report.ratios["c1_step_vs_ours_c10d"] == pytest.approx(2 / 3)
    assert report.ratios["c1_host_cpu_vs_c10d"] == pytest.approx(4 / 9)
    assert report.quartiles["c1_host_cpu_vs_c10d"] == pytest.approx([4 / 9] * 3)
    assert report.ratios["no_zero_copy"] == pytest.approx(4 / 3)
    rows = {row["variant"]: row for row in results._rows(plan_of("auto"), "c1", *found["transports"])}
    assert (rows[OURS]["transport"], rows[OURS_C10D]["transport"]) == ("shm", "c10d")
    assert rows[OURS]["host_cpu_ms"] == pytest.approx(8000)
    assert "transport" not in rows[FLOOR]
    assert results._transport(found) == "shm"


def test_ablations_of_ours_are_held_against_ours() -> None:
    report = Report("fsdp-step")
    results._add_ratios(report, "c1", {"ablations": found_of([FLOOR, OURS, "no_pipeline"])})
    assert report.ratios["no_pipeline"] == pytest.approx(3 / 2)
    assert "c1_host_cpu_vs_c10d" not in report.ratios
