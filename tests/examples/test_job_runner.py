"""Following a Megatron job: its log, the reason of its failure, its end."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.conftest import EXAMPLES


@pytest.fixture
def runner() -> ModuleType:
    return importlib.import_module("job_runner")


def line(iteration: int, loss: float, ms: float = 300.0) -> str:
    return (
        f" [2026-01-01 00:00:00.000000] iteration {iteration:8d}/     100 | consumed samples:    32 | elapsed time "
        f"per iteration (ms): {ms} | learning rate: 1.0E-04 | global batch size:    32 | lm loss: {loss:.6E} | "
        "loss scale: 1.0 | grad norm: 9.434 | number of skipped iterations:   0 |\n"
    )


def test_losses_times_and_evaluations_are_read(runner: ModuleType) -> None:
    log = runner.RunLog()
    assert [log.read(line(i, loss)) for i, loss in ((1, 5.0), (2, 4.5), (3, 3.0))] == [1, 2, 3]
    assert log.read("noise lm loss: 1.0") is None
    log.read(
        " validation loss at iteration 100 on validation set | lm loss value: 2.600878E+00 | lm loss PPL: 1.3E+01 | "
    )
    log.read(" validation loss at iteration 100 on test set | lm loss value: 2.4E+00 | ")
    assert log.step_ms == {1: 300.0, 2: 300.0, 3: 300.0}
    assert log.evaluations == {"validation": 2.600878, "test": 2.4}


def test_the_second_printed_loss_which_is_a_mean_of_two_is_taken_apart(runner: ModuleType) -> None:
    log = runner.RunLog()
    for iteration, printed in ((51, 2.0), (52, 3.0), (53, 5.0)):
        log.read(line(iteration, printed))
    assert log.losses == {51: 2.0, 52: 4.0, 53: 5.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("noise\nhp_plugin: error: sizes do not divide.\nValueError: later\n", "sizes do not divide"),
        ("hp_plugin: error [rank 2]: no memory.\n", "no memory"),
        ("error: the data set x is missing.\n", "the data set x is missing"),
        ("[rank1]: RuntimeError: peer closed\n[rank0]: OSError: [Errno 28] No space left on device\n",
         "OSError: [Errno 28] No space left on device"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nValueError: x\n", "ValueError: x"),
        ("nothing\n", "no rank said why"),
    ],
)  # fmt: skip
def test_the_most_telling_line_of_a_failed_log_is_found(
    runner: ModuleType, tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "run.log"
    path.write_text(text)
    assert runner.failure_in(path) == reason


@pytest.mark.parametrize(
    ("script", "limit_s", "sentence"),
    [
        ("import time\nprint('started', flush=True)\ntime.sleep(600)\n", 18.0, "a job did not finish within 18 s"),
        (
            "raise SystemExit('error: there is no corpus.')\n",
            120.0,
            "a job failed with exit status 1: there is no corpus;",
        ),
    ],
)
def test_a_job_that_fails_or_hangs_is_one_sentence_and_leaves_no_process(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, limit_s: float, sentence: str
) -> None:
    pytest.importorskip("megatron.core")
    path = tmp_path / "script.py"
    path.write_text(script)
    monkeypatch.setattr(runner, "SCRIPT", path)
    before = descendants()
    with pytest.raises(runner.JobError) as error:
        runner.run("a job", ranks=2, arguments=["--hyperfsdp-device", "cpu"], log_file=tmp_path / "log",
                   timeout_s=limit_s, on_iteration=lambda *_: None)  # fmt: skip
    assert str(error.value).startswith(sentence)
    assert descendants() == before


TWO_PIECES = """
import sys, time
sys.stderr.write("error: there is")
time.sleep(1)
sys.stderr.write(" no corpus.\\n")
raise SystemExit(1)
"""


def test_lines_of_several_ranks_stay_whole(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    path, log = tmp_path / "script.py", tmp_path / "log"
    path.write_text(TWO_PIECES)
    monkeypatch.setattr(runner, "SCRIPT", path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with pytest.raises(runner.JobError, match=r"exit status 1: there is no corpus; its log"):
        runner.run("a job", ranks=2, arguments=["--hyperfsdp-device", "cpu"], log_file=log, timeout_s=120.0,
                   on_iteration=lambda *_: None)  # fmt: skip


INTERRUPTED = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import job_runner
job_runner.SCRIPT = Path(sys.argv[2])
job_runner.run("a job", ranks=2, arguments=["--hyperfsdp-device", "cpu"], log_file=Path(sys.argv[3]), timeout_s=200,
               on_iteration=lambda *_: None)
"""


def test_an_interrupt_ends_every_process_of_the_job(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import time\nprint('started', flush=True)\ntime.sleep(600)\n")
    before = descendants()
    words = [sys.executable, "-c", INTERRUPTED, str(EXAMPLES), str(script), str(log)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 150
        while not (log.exists() and "started" in log.read_text()):
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.2)
        assert descendants() > before
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
        process.wait()
    assert descendants() == before


def descendants() -> set[str]:
    """Command lines of running processes of this script's folder."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"script.py") for word in words):
            found.add(entry)
    return found
