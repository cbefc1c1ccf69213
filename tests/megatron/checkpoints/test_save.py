"""A checkpoint that cannot be written: one sentence, a non-zero exit, and what was there before."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.megatron import training
from tests.megatron.cases import tiny_job
from tests.support import RanksFailedError, run_ranks

LARGEST_FILE = 300_000  # bytes; a rank's part of the tiny model's checkpoint has more


def train_with_little_room(*, argv: list[str], largest_file: int) -> training.Run:
    """Train on this rank, where no file may grow beyond `largest_file`: what a full disk looks like from here."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    return training.train(argv=argv, keep_weights=False)


def test_a_full_disk_ends_the_job_with_a_sentence_and_the_previous_checkpoint(
    corpus: list[str], tmp_path: Path
) -> None:
    save = ["--use-hyperfsdp", "--hyperfsdp-supernode-size", "2", "--save", str(tmp_path), "--save-interval", "2"]
    run_ranks(
        2,
        training.train,
        flavour="megatron",
        argv=[*tiny_job("--train-iters", "2"), *corpus, *save],
        keep_weights=False,
    )
    argv = [*tiny_job("--train-iters", "4", "--load", str(tmp_path), "--override-opt_param-scheduler"), *corpus, *save]
    env = {"HP_TRANSPORT": "c10d"}  # shared memory is a file too, and the limit would forbid it
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, train_with_little_room, flavour="megatron", env=env, argv=argv, largest_file=LARGEST_FILE)
    assert failure.value.reports[0].exit_code == 1
    said = failure.value.reports[0].output
    assert "hp_plugin: error: the checkpoint of iteration 4 could not be written" in said
    assert "last complete checkpoint is that of iteration 2" in said
    assert "Traceback" not in said
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "iter_0000002" / ".metadata").is_file()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import megatron.training

    monkeypatch.setattr(megatron.training, "get_args", lambda: SimpleNamespace(save=str(tmp_path)))
    return tmp_path


def guarded(original: Any) -> Any:
    from hp_plugin.megatron.checkpoints.save import guard_save_checkpoint

    return guard_save_checkpoint(original)


def test_a_tracker_that_was_cut_off_is_put_back(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "latest_checkpointed_iteration.txt").write_text("6")

    def save_checkpoint(iteration: int) -> None:
        (place / f"iter_{iteration:07d}").mkdir()
        (place / "latest_checkpointed_iteration.txt").write_text("")
        raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit) as end:
        guarded(save_checkpoint)(8)
    assert end.value.code == 1
    assert "No space left on device" in capsys.readouterr().err
    assert (place / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert not (place / "iter_0000008").exists()


def test_a_directory_that_existed_before_is_left_and_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "iter_0000008").mkdir()

    def save_checkpoint(iteration: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit):
        guarded(save_checkpoint)(8)
    assert "iter_0000008 existed before and may be incomplete now" in capsys.readouterr().err
    assert (place / "iter_0000008").exists()


def test_an_error_of_another_kind_stays_an_error_but_leaves_no_half_written_checkpoint(place: Path) -> None:
    def save_checkpoint(iteration: int) -> None:
        (place / f"iter_{iteration:07d}").mkdir()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(save_checkpoint)(8)
    assert list(place.iterdir()) == []


def test_a_save_that_works_is_left_alone(place: Path) -> None:
    def save_checkpoint(iteration: int, model: str) -> str:
        (place / f"iter_{iteration:07d}").mkdir()
        return model

    assert guarded(save_checkpoint)(8, model="m") == "m"
    assert (place / "iter_0000008").exists()
