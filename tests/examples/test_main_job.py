"""The verdict of the main job: it must be able to say no."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the main job draws a picture")


@pytest.fixture
def main_job() -> ModuleType:
    return importlib.import_module("main_job")


def log(losses: dict[int, float], validation: float = 2.0) -> Any:
    runner = importlib.import_module("job_runner")
    return runner.RunLog(losses, dict.fromkeys(losses, 300.0), {"validation": validation})


def falling(first: int = 1, last: int = 100, *, scale: float = 1.0) -> dict[int, float]:
    return {i: scale * (2.0 + 3.0 / i) for i in range(first, last + 1)}


def verdict(main_job: ModuleType, *, ours: Any = None, resumed: Any = None, half: Any = None) -> list[str]:
    """Statements that do not hold."""
    report = importlib.import_module("job_report")
    settings = main_job.parse([])
    logs = [log(falling()), ours or log(falling()), resumed or log(falling(51))]
    results = [report.Result(str(number), entry, []) for number, entry in enumerate(logs)]
    checks = main_job.checks(settings, results, half or log(falling(last=50)))
    return [check.statement for check in checks if not check.holds]


def test_equal_runs_that_reach_the_target_are_accepted(main_job: ModuleType) -> None:
    assert verdict(main_job) == []
    assert verdict(main_job, ours=log(falling(scale=1 + 5e-6))) == []


def test_a_difference_to_stock_is_rejected(main_job: ModuleType) -> None:
    failed = verdict(main_job, ours=log({**falling(), 70: 2.0}))
    assert any("HyperFSDP's losses are stock's" in statement for statement in failed)
    assert any("validation" in statement for statement in verdict(main_job, ours=log(falling(), validation=2.001)))


def test_a_resumed_or_stopped_run_that_differs_is_rejected(main_job: ModuleType) -> None:
    (failed,) = verdict(main_job, resumed=log(falling(51, scale=1.0001)))
    assert "resumed" in failed
    (failed,) = verdict(main_job, half=log(falling(last=50, scale=1.0001)))
    assert "stopped" in failed


def test_nan_is_never_agreement(main_job: ModuleType) -> None:
    assert verdict(main_job, ours=log({**falling(), 100: float("nan")}))


def test_a_target_that_is_missed_is_rejected(main_job: ModuleType) -> None:
    high = falling()
    high[100] = 2.5
    report = importlib.import_module("job_report")
    results = [report.Result("r", log(high), []) for _ in range(2)] + [report.Result("r", log({100: 2.5}), [])]
    checks = main_job.checks(main_job.parse([]), results, log(falling(last=50)))
    assert [check.statement for check in checks if not check.holds] == ["the loss at 100 is below 2.4"]


def test_unknown_arguments_go_to_megatron(main_job: ModuleType) -> None:
    settings = main_job.parse(["--out", "x", "--bf16", "--tensor-model-parallel-size", "2"])
    assert settings.extra == ("--bf16", "--tensor-model-parallel-size", "2")
    assert settings.out == Path("x")


def test_table_and_picture_are_made_also_without_metrics(main_job: ModuleType, tmp_path: Path) -> None:
    report = importlib.import_module("job_report")
    metrics = [{"rank": 0, "peak_bytes": 2**20, "intra_bytes": 3 * 2**20, "inter_bytes": 0}] * 2
    results = [report.Result("stock", log(falling()), metrics), report.Result("ours", log(falling(51)), [])]
    console = importlib.import_module("rich.console").Console(width=130, record=True)
    console.print(report.table(results, (1, 100)))
    text = console.export_text()
    assert "6.0 MiB" in text
    assert "5.000000" in text
    report.plot(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
