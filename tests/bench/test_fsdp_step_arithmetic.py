"""Bound, calibration, settings and sweep of the fsdp-step benchmark, without ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from bench.errors import UnavailableError
from bench.fsdp_step import command, recorded, settings
from bench.fsdp_step.bound import Schedule, schedule_of
from bench.fsdp_step.calibration import corrected_layer, drift
from bench.fsdp_step.pace import Pace, wait_until


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
    assert 0.03 <= time.perf_counter() - start < 0.3
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
        ({"transport": "shm"}, "not built"),
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
