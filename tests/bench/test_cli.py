"""`python -m bench`: options, output channels, exit codes, and benchmarks that cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from bench import cli
from bench.errors import BenchError, UnavailableError
from bench.report import Report

REPOSITORY = Path(__file__).resolve().parents[2]


def noisy(*, quick: bool = False, size: Annotated[int, typer.Option("--size", help="How large.")] = 3) -> Report:
    """Measure nothing, loudly.

    Args:
        quick: less of it.
        size: how large.
    """
    print("printed by Python")
    os.write(1, b"written by a library\n")
    subprocess.run([sys.executable, "-c", "print('printed by a child')"], check=True)
    return Report("noisy", environment={"quick": quick}, rows=[{"size": size}])


def failing(*, quick: bool = False) -> Report:
    """Fail with a sentence."""
    raise BenchError("found this, expected that, change it so")


def disappointing(*, quick: bool = False) -> Report:
    """Measure, and find that it is not good enough."""
    return Report("disappointing", rows=[{"size": 3}], failures=["the size is 3, not 4"])


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line with the benchmarks of this file, and one whose module does not exist."""
    for function in (noisy, failing, disappointing):
        name = function.__name__
        module: Any = types.ModuleType(f"bench_test_{name}")
        module.benchmark = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.BENCHMARKS, name, (module.__name__, f"What {name} measures."))
    monkeypatch.setitem(cli.BENCHMARKS, "broken", ("bench.module_that_does_not_exist", "Nothing."))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.usefixtures("benchmarks")
def test_json_alone_reaches_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy", "--json", "--size", "5", "--quick") == 0
    out, err = capfd.readouterr()
    value = json.loads(out)
    assert value["rows"] == [{"size": 5}]
    assert value["environment"]["quick"] is True
    for text in ("printed by Python", "written by a library", "printed by a child"):
        assert text in err


@pytest.mark.usefixtures("benchmarks")
def test_table_is_printed_without_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy") == 0
    out, _ = capfd.readouterr()
    assert "noisy" in out and "size" in out and "│    3 │" in out
    assert "{" not in out


@pytest.mark.usefixtures("benchmarks")
def test_output_also_writes_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy", "--json", "--output", str(tmp_path)) == 0
    assert json.loads((tmp_path / "noisy.json").read_text()) == json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("benchmarks")
def test_machine_and_load_are_a_part_of_every_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy", "--json") == 0
    facts = json.loads(capfd.readouterr().out)["environment"]
    assert {"cores", "torch", "load_average_start", "load_average_end", "quick"} <= set(facts)


@pytest.mark.usefixtures("benchmarks")
def test_failure_with_a_sentence_has_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("failing", "--json") == 1
    out, err = capfd.readouterr()
    assert not out
    assert err == "error: found this, expected that, change it so\n"


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_report_of_a_failure_is_printed_and_the_exit_code_tells(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("disappointing", *flags, "--output", str(tmp_path)) == 1
    printed = capfd.readouterr()
    assert "the size is 3, not 4" in printed.err
    if flags:
        assert json.loads(printed.out)["failures"] == ["the size is 3, not 4"]
    else:
        assert "size" in printed.out
    assert json.loads((tmp_path / "disappointing.json").read_text())["rows"] == [{"size": 3}]


@pytest.mark.usefixtures("benchmarks")
def test_benchmark_that_cannot_be_imported_breaks_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("broken") == 2
    err = capfd.readouterr().err
    assert "the benchmark 'broken' cannot be loaded from bench.module_that_does_not_exist: ModuleNotFoundError" in err
    assert run("noisy", "--json") == 0


@pytest.mark.usefixtures("benchmarks")
def test_help_of_a_benchmark_lists_its_own_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy", "--help") == 0
    out = capfd.readouterr().out
    for text in ("Measure nothing, loudly.", "--size", "How large.", "--json", "--quick", "--output"):
        assert text in out
    assert "Args:" not in out


@pytest.mark.usefixtures("benchmarks")
def test_unknown_options_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("noisy", "--colour") == 2
    assert "--colour" in capfd.readouterr().err


def test_every_name_is_listed_without_importing_a_benchmark() -> None:
    code = (
        "import sys, contextlib\nfrom bench import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.main(['--help'])\n"
        "print([name for name, _ in cli.BENCHMARKS.values() if name in sys.modules], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60.0, check=True
    )
    for name in [*cli.BENCHMARKS, "all", "clean"]:
        assert name in done.stdout
    assert done.stdout.endswith("[] False\n")


@pytest.mark.parametrize("name", list(cli.BENCHMARKS))
def test_every_registered_benchmark_can_be_loaded(name: str) -> None:
    try:
        command = cli._load_command(name)
    except UnavailableError as error:
        missing = getattr(error.__cause__, "name", None) or ""
        if missing.partition(".")[0] in ("megatron", "deepspeed", "matplotlib"):
            pytest.skip(f"{missing} is not installed")
        raise
    assert {"--quick", "--json", "--output"} <= {option for parameter in command.params for option in parameter.opts}


def test_all_runs_every_benchmark_and_names_those_that_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started = []

    def fake_run(command: list[str], **options: object) -> types.SimpleNamespace:
        started.append(command)
        return types.SimpleNamespace(returncode=int(command[3] == "memory"))

    monkeypatch.setattr(cli.subprocess, "run", fake_run)
    assert run("all", "--quick", "--output", str(tmp_path)) == 1
    assert [command[3] for command in started] == list(cli.BENCHMARKS)
    assert all(command[4:] == ["--output", str(tmp_path), "--quick"] for command in started)
    assert "these benchmarks failed: memory;" in capfd.readouterr().err
