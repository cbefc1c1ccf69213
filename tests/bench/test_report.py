"""Reports: what is serialised, what is refused, what people see."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.environment import environment, finished
from bench.report import Report


def filled() -> Report:
    report = Report("fsdp-step", environment={"testbed": {"rate_mbit": 1000.0}})
    report.rows = [{"variant": "ours", "step_ms": 717.5}, {"variant": "peer", "step_ms": 1355.25, "note": "slow"}]
    report.rounds = [{"round": 0, "ours": 0.7, "peer": 1.3, "rejected": False}]
    report.notes = ["On gloo FSDP2 is synchronous [sic]."]
    report.add_ratio("step_vs_peer", [0.5, 0.6, 0.7, 0.8, 0.9])
    return report


def test_json_is_one_line_with_the_agreed_keys() -> None:
    text = filled().to_json()
    assert "\n" not in text
    value = json.loads(text)
    assert list(value) == ["name", "environment", "rows", "ratios", "quartiles", "rounds", "notes", "failures"]
    assert value["name"] == "fsdp-step"
    assert value["ratios"] == {"step_vs_peer": 0.7}
    assert value["quartiles"] == {"step_vs_peer": [0.6, 0.7, 0.8]}
    assert value["rows"][1] == {"variant": "peer", "step_ms": 1355.25, "note": "slow"}


def test_raw_rounds_are_kept_so_that_a_reader_can_recompute() -> None:
    assert json.loads(filled().to_json())["rounds"] == [{"round": 0, "ours": 0.7, "peer": 1.3, "rejected": False}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(value: float) -> None:
    assert json.loads(Report("x", rows=[{"a": value}]).to_json())["rows"] == [{"a": None}]


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object()])
def test_values_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a report holds .*; it takes None, bool, int, float, str"):
        Report("x", rows=[{"a": [value]}]).to_json()


def test_written_file_holds_the_same_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "results" / "deep"
    path = filled().write(directory)
    assert path == directory / "fsdp-step.json"
    assert json.loads(path.read_text()) == filled().as_dict() | {"quartiles": {"step_vs_peer": [0.6, 0.7, 0.8]}}
    assert list(directory.iterdir()) == [path]


def test_report_that_cannot_be_serialised_does_not_damage_an_earlier_one(tmp_path: Path) -> None:
    path = filled().write(tmp_path)
    before = path.read_text()
    broken = filled()
    broken.rows = [{"a": object()}]
    with pytest.raises(TypeError):
        broken.write(tmp_path)
    assert path.read_text() == before


def test_tables_show_rows_ratios_and_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    filled().print()
    shown = capsys.readouterr().out
    for text in ("step ms", "717.5", "1355", "slow", "step_vs_peer", "0.7", "0.8", "synchronous [sic]."):
        assert text in shown


def test_environment_says_what_the_figures_came_from_and_not_where() -> None:
    import socket

    import torch

    facts = finished(environment())
    assert facts["torch"] == torch.__version__ or facts["torch"] == torch.__version__.partition("+")[0]
    assert facts["hp_plugin"]
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0.5
    assert len(facts["load_average_start"]) == len(facts["load_average_end"]) == 3
    text = Report("x", environment=facts).to_json()
    assert "/" not in facts["kernel"] + facts["python"]
    assert socket.gethostname() not in text
    assert str(Path.cwd()) not in text
