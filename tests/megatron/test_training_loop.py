"""The rest of Megatron's training loop: flags that have nothing to do with data parallelism do what they did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.megatron import training
from tests.megatron.cases import FP32_TOLERANCE, tiny_job
from tests.megatron.checkpoints.jobs import END, EXACT, HALF, SavedJobs, assert_continues, ours, stock
from tests.megatron.training import Run
from tests.support import run_ranks

EVERYDAY = (
    "--eval-interval 5 --eval-iters 2 --step-batch-size-schedule 0:8,3072:16 --train-samples 144 --decoupled-lr 5e-4 "
    "--untie-embeddings-and-output-weights --start-weight-decay 0.01 --end-weight-decay 0.1 "
    "--weight-decay-incr-style linear --log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --log-throughput "
    "--manual-gc --manual-gc-interval 3 --log-memory-to-tensorboard"
)
OURS = "--use-hyperfsdp --hyperfsdp-supernode-size 2"


def train(corpus: list[str], arguments: str, *, ranks: int = 4) -> list[Run]:
    """A job that counts samples, where the arguments say so, and iterations otherwise."""
    argv = [*tiny_job(*arguments.split()), *corpus]
    if "--train-samples" in argv:
        for name in ("--train-iters", "--lr-warmup-iters", "--lr-decay-iters", "--global-batch-size"):
            index = argv.index(name)
            del argv[index : index + 2]
        argv += ["--lr-decay-samples", "3200", "--lr-warmup-samples", "32"]
    return run_ranks(ranks, training.train, flavour="megatron", timeout=120.0, argv=argv)


def assert_trains_alike(expected: list[Run], found: list[Run]) -> None:
    theirs, mine = expected[-1], found[-1]
    assert theirs.losses and mine.losses == pytest.approx(theirs.losses, rel=FP32_TOLERANCE)
    assert mine.norms == pytest.approx(theirs.norms, rel=FP32_TOLERANCE)
    assert mine.evaluated == pytest.approx(theirs.evaluated, rel=FP32_TOLERANCE)
    for iteration, (zeros, norm) in theirs.logged.items():
        assert mine.logged[iteration][0] == zeros
        assert mine.logged[iteration][1] == (None if norm is None else pytest.approx(norm, rel=1e-6))


def test_a_job_with_everyday_flags_trains_and_evaluates_as_stock_does(corpus: list[str]) -> None:
    """Evaluation between steps, a growing batch size, other learning rates, growing weight decay, timers, logs."""
    expected = train(corpus, EVERYDAY)
    found = train(corpus, f"{EVERYDAY} {OURS}")
    assert_trains_alike(expected, found)
    assert len(expected[-1].losses) == 12, "6 iterations of 8 samples (3072 tokens), then 6 of 16"
    assert len(expected[-1].evaluated) >= 3, "after 5 and 10 iterations, and at the end"


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "--init-model-with-meta-device --train-iters 3",
        "--rerun-mode disabled --no-check-for-nan-in-loss-and-grad --train-iters 3",
        "--timing-log-level 1 --timing-log-option all --train-iters 3",
    ],
    ids=["meta-device", "no-checks", "timers"],
)
def test_a_job_with_a_rare_flag_trains_as_stock_does(arguments: str, corpus: list[str]) -> None:
    assert_trains_alike(train(corpus, arguments, ranks=2), train(corpus, f"{arguments} {OURS}", ranks=2))


@pytest.mark.full
def test_a_job_that_leaves_at_an_interval_saves_first_and_goes_on_in_stock(corpus: list[str], tmp_path: Path) -> None:
    jobs = SavedJobs(corpus, tmp_path)
    whole = jobs.run("", ours(2, 2))
    left = jobs.run("", ours(2, 2, f"--exit-interval {HALF}"), save=tmp_path / "left", every=1000)
    assert [run.exit_code for run in left] == [0, 0]
    assert sorted(left[-1].losses) == list(range(1, HALF + 1))
    for layout in (ours(2, 1), stock(2)):
        assert_continues(whole, jobs.run("", layout, load=(tmp_path / "left", HALF)))


@pytest.mark.full
def test_a_signal_ends_all_ranks_after_a_checkpoint(corpus: list[str], tmp_path: Path) -> None:
    jobs = SavedJobs(corpus, tmp_path)
    whole = jobs.run("", ours(2, 2))
    argv = [*tiny_job("--train-iters", str(END)), *corpus, *ours(2, 2, "--exit-signal-handler").arguments.split()]
    argv += ["--save", str(tmp_path / "left"), "--save-interval", "1000"]
    left = run_ranks(2, training.train_until_signal, flavour="megatron", timeout=90.0, argv=argv, iteration=HALF - 1)
    assert [run.exit_code for run in left] == [0, 0]
    last = max(left[-1].losses)
    assert last < END, "the signal came too late"
    assert_continues(whole, jobs.run("", ours(2, 2), load=(tmp_path / "left", last)), last, EXACT)


@pytest.mark.full
def test_the_trace_of_megatrons_profiler_names_our_units(corpus: list[str], tmp_path: Path) -> None:
    arguments = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --profile-ranks 0"
    scalars = tmp_path / "scalars"  # Megatron puts traces beside it
    train(corpus, f"{arguments} --tensorboard-dir {scalars} --train-iters 5 {OURS}", ranks=2)
    with gzip.open(tmp_path / "torch_profile" / "rank-0.json.gz", "rt") as trace:
        names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
    assert "hyperfsdp all-gather decoder.layers.0" in names
    assert "hyperfsdp reduce-scatter decoder.layers.3" in names
