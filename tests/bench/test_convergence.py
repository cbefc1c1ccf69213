"""The gate of the convergence benchmark passes what is noise and fails what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.convergence.command import fill
from bench.convergence.data import Batches
from bench.convergence.gate import Curve, Noise, judge, loss_difference, ratio, weight_difference
from bench.convergence.model import Size
from bench.convergence.train import Runs, train
from bench.convergence.trainers import make_trainer
from bench.convergence.variants import FAULTS, OURS, WRONG, Variant, stock
from bench.report import Report
from tests.support import init_gloo
from tests.support.ranks import run_ranks

TINY = Size(layers=1, dim=16, heads=2, length=16, batch=2)


def curve(*, offset: float = 0.0, weight: float = 0.0, steps: int = 20) -> Curve:
    losses = 5.0 - np.linspace(0.0, 2.0, steps)
    losses[-1] += offset
    return Curve(losses, np.array([1.0, 2.0 + weight], dtype=np.float32))


def noisy_stock() -> dict[str, Curve]:
    return {"a": curve(), "b": curve(offset=1e-4, weight=1e-3), "c": curve(offset=-1e-4)}


# ---- the gate -------------------------------------------------------------------------------------------------------


def test_noise_is_the_largest_difference_of_any_pair() -> None:
    noise = Noise.between(noisy_stock())
    assert noise.loss == pytest.approx(2e-4)
    assert noise.weight == pytest.approx(1e-3, rel=1e-3)
    assert noise.equal_pairs == ()


def test_equal_curves_pass() -> None:
    stock_runs = noisy_stock()
    verdict = judge(curve(), stock_runs, Noise.between(stock_runs))
    assert verdict.passes
    assert verdict.loss_ratio == pytest.approx(0.5)
    assert verdict.pearson > 0.999


@pytest.mark.parametrize(
    "wrong",
    [
        curve(offset=1e-3),
        curve(weight=1e-2),
        curve(offset=math.nan),
        curve(weight=math.inf),
        Curve(curve().losses, np.empty(0)),
    ],
    ids=["loss", "weight", "nan loss", "inf weight", "stopped early"],
)
def test_a_wrong_run_fails(wrong: Curve) -> None:
    stock_runs = noisy_stock()
    assert not judge(wrong, stock_runs, Noise.between(stock_runs)).passes


def test_three_times_the_noise_is_the_limit() -> None:
    stock_runs = {"a": curve(), "b": curve(offset=1e-4, weight=1e-3)}
    noise = Noise.between(stock_runs)
    assert judge(curve(offset=-1.9e-4), stock_runs, noise).passes
    assert not judge(curve(offset=-2.1e-4), stock_runs, noise).passes


def test_without_noise_only_equality_passes() -> None:
    stock_runs = {"a": curve(), "b": curve()}
    noise = Noise.between(stock_runs)
    assert noise.equal_pairs == (("a", "b"),)
    assert judge(curve(), stock_runs, noise).passes
    assert not judge(curve(offset=1e-12), stock_runs, noise).passes
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1.0, 0.0) == math.inf


def test_noise_needs_two_runs() -> None:
    with pytest.raises(ValueError, match="two stock runs"):
        Noise.between({"a": curve()})


# ---- the report -----------------------------------------------------------------------------------------------------


def runs(*, ours: Curve, wrong: Curve) -> Runs:
    names = [*noisy_stock(), "ours", *FAULTS]
    return Runs(noisy_stock(), ours, dict.fromkeys(FAULTS, wrong), dict.fromkeys(names, 1.0))


def test_report_says_passed_and_takes_the_worse_precision() -> None:
    report = Report("convergence")
    good = runs(ours=curve(), wrong=curve(offset=1.0))
    worse = runs(ours=curve(offset=2e-4), wrong=curve(offset=1.0))
    assert fill(report, {"fp32": good, "bf16": worse}) == []
    assert report.environment["passed"] is True
    assert (
        report.ratios["loss_diff_vs_stock_noise"]
        == report.ratios["loss_diff_vs_stock_noise_bf16"]
        == pytest.approx(1.5)
    )
    assert report.ratios["loss_diff_vs_stock_noise_fp32"] == pytest.approx(0.5)
    report.to_json()


def test_report_names_a_wrong_run_that_passes() -> None:
    failures = fill(Report("convergence"), {"fp32": runs(ours=curve(), wrong=curve())})
    assert len(failures) == len(FAULTS)
    assert all("let a wrong run pass" in failure for failure in failures)


def test_report_says_that_ours_fails() -> None:
    report = Report("convergence")
    failures = fill(report, {"bf16": runs(ours=curve(offset=1.0), wrong=curve(offset=1.0))})
    assert len(failures) == 1
    assert failures[0].startswith("bf16: ours")
    assert report.environment["passed"] is False


def test_stock_runs_without_noise_are_said_to_be_so() -> None:
    equal = Runs({"a": curve(), "b": curve()}, curve(), {}, dict.fromkeys(("a", "b", "ours"), 1.0))
    report = Report("convergence")
    assert fill(report, {"fp32": equal}) == []
    assert any("Equal bit by bit" in note and "a and b" in note and "noise is zero" in note for note in report.notes)


# ---- the data and the runs ------------------------------------------------------------------------------------------


def corpus_at(directory: Path) -> Path:
    path = directory / "corpus.bin"
    np.random.default_rng(0).integers(97, 105, 5000).astype(np.uint16).tofile(path)
    return path


def test_batches_depend_on_step_rank_and_index_alone(tmp_path: Path) -> None:
    path = corpus_at(tmp_path)
    make = [Batches(path, ranks=2, micro_batches=2, batch=3, length=8) for _ in range(2)]
    inputs, targets = make[0].get(4, 1, 0)
    assert inputs.shape == targets.shape == (3, 8)
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])
    torch.testing.assert_close(inputs, make[1].get(4, 1, 0)[0])
    others = [make[0].get(*where)[0] for where in ((5, 1, 0), (4, 0, 0), (4, 1, 1))]
    assert not any(torch.equal(inputs, other) for other in others)


def _train_some(*, corpus: Path, mixed: bool) -> dict[str, Curve]:
    init_gloo()
    variants = [*(v for v in stock(mixed=mixed) if v.engine != "megatron_ddp"), OURS, *WRONG]
    return {v.name: train(v, corpus=corpus, size=TINY, steps=10, mixed=mixed) for v in variants}


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.full)], ids=["fp32", "bf16"])
def test_short_runs_of_ours_pass_and_wrong_ones_fail(tmp_path: Path, mixed: bool) -> None:
    by_rank = run_ranks(4, _train_some, corpus=corpus_at(tmp_path), mixed=mixed)
    curves = by_rank[0]
    for other in by_rank[1:]:  # every rank must stop a wrong run at the same step
        assert all(np.array_equal(curves[name].losses, other[name].losses) for name in curves)
    stock_runs = {v.name: curves[v.name] for v in stock(mixed=mixed) if v.name in curves}
    noise = Noise.between(stock_runs)
    for fault in FAULTS:
        verdict = judge(curves[fault], stock_runs, noise)
        assert not verdict.passes
        assert verdict.loss_ratio > 3, f"{fault} shows in the loss after 10 steps"
    # Ten steps of a tiny model are too few for noise to be a measure; what is right is within rounding.
    bound = 5e-3 if mixed else 1e-5
    assert max(loss_difference(curves["ours"], other) for other in stock_runs.values()) < bound
    assert math.isfinite(max(weight_difference(curves["ours"], other) for other in stock_runs.values()))
    assert curves["ours"].losses[-1] < curves["ours"].losses[0]


def _stop_early(*, corpus: Path) -> int:
    init_gloo()
    right = train(OURS, corpus=corpus, size=TINY, steps=30, mixed=False)
    wrong = train(WRONG[0], corpus=corpus, size=TINY, steps=30, mixed=False, against={"right": right}, limit=1e-4)
    assert wrong.weights.size == 0
    assert right.weights.size > 0
    return len(wrong.losses)


def test_a_wrong_run_stops_once_the_gate_has_failed(tmp_path: Path) -> None:
    steps = run_ranks(4, _stop_early, corpus=corpus_at(tmp_path))
    assert len(set(steps)) == 1
    assert steps[0] in (10, 20)


def test_bf16_compute_is_refused_by_a_ddp() -> None:
    with pytest.raises(ValueError, match="compare with fsdp2"):
        make_trainer(Variant("ddp", "ddp"), torch.nn.Module(), size=TINY, mixed=True)  # type: ignore[arg-type]
