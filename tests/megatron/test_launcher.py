"""``python -m hp_plugin.megatron SCRIPT ARGS``: the script runs as if started itself, and errors are sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hp_plugin.megatron
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron import launcher

TIME_LIMIT_S = 150


def write(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def start(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hp_plugin.megatron", *words], capture_output=True, text=True,
        timeout=TIME_LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HP_DEVICE": "cpu", **environment},
    )  # fmt: skip


SCRIPT = """
import json, multiprocessing, pickle, sys
import helper_beside_the_script

class Defined:
    pass

if __name__ == "__main__":
    # Megatron's checkpointing does this; the child imports __main__ again.
    manager = multiprocessing.get_context("spawn").Manager()
    queue = manager.Queue()
    queue.put(1)
    from hp_plugin.megatron import rebound_names
    print(json.dumps({"argv": sys.argv, "file": __file__, "got": queue.get(), "rebound": rebound_names(),
                      "pickled": type(pickle.loads(pickle.dumps(Defined()))).__name__}))
    manager.shutdown()
else:
    print("imported again")
"""


def test_a_script_runs_as_main_with_its_arguments_and_is_not_run_again_by_spawned_children(tmp_path: Path) -> None:
    write(tmp_path, "", "helper_beside_the_script.py")
    script = write(tmp_path, SCRIPT)
    done = start(str(script), "--flag", "value with a space")
    assert done.returncode == 0, done.stderr
    announcement, line = done.stdout.splitlines()
    assert announcement.startswith("hp_plugin: CPU compatibility layer is on")
    assert json.loads(line) == {
        "argv": [str(script), "--flag", "value with a space"],
        "file": str(script),
        "got": 1,
        "rebound": ["megatron.training.arguments.parse_args"],
        "pickled": "Defined",
    }


@pytest.fixture
def no_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hp_plugin.megatron, "install", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "0")


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hp_plugin.megatron", *words])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(SystemExit) as end:
        launcher.main()
    return int(end.value.code or 0)


REFUSAL = "from hp_plugin.errors import ConfigurationError\nraise ConfigurationError('sizes do not divide.')\n"


@pytest.mark.usefixtures("no_install")
class TestErrors:
    def test_without_a_script_the_usage_is_printed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_main(monkeypatch) == 2
        assert capsys.readouterr().out.startswith("usage: python -m hp_plugin.megatron SCRIPT")

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [(["nowhere.py"], "the script nowhere.py does not exist"), (["--lr", "1"], "found the flag --lr")],
    )
    def test_what_is_not_a_script_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
    ) -> None:
        assert run_main(monkeypatch, *words) == 2
        assert sentence in capsys.readouterr().err

    def test_an_installation_that_is_refused_is_one_sentence(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        def refuse() -> None:
            raise UnsupportedError("megatron-core 0.12.1 is installed.")

        monkeypatch.setattr(hp_plugin.megatron, "install", refuse)
        assert run_main(monkeypatch, str(write(tmp_path, ""))) == 2
        assert capsys.readouterr().err == "hp_plugin: error: megatron-core 0.12.1 is installed.\n"

    def test_a_refusal_from_inside_the_script_is_one_sentence_and_a_failure(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert run_main(monkeypatch, str(write(tmp_path, REFUSAL))) == 1
        assert capsys.readouterr().err == "hp_plugin: error: sizes do not divide.\n"

    def test_the_place_of_a_refusal_can_be_asked_for(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(launcher.TRACEBACK_VARIABLE, "1")
        with pytest.raises(ValueError, match="sizes do not divide") as raised:
            launcher.run_script(str(write(tmp_path, REFUSAL)), ModuleType("__main__"))
        assert raised.traceback[-1].path == tmp_path / "train.py"

    def test_other_exceptions_keep_their_traceback(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError):
            launcher.run_script(str(write(tmp_path, "1 / 0")), ModuleType("__main__"))

    def test_a_rank_that_fails_alone_says_who_it_is(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setenv("RANK", "3")
        assert run_main(monkeypatch, str(write(tmp_path, REFUSAL))) == 1
        assert capsys.readouterr().err == "hp_plugin: error [rank 3]: sizes do not divide.\n"
