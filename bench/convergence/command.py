"""`python -m bench convergence`: the runs, the gate, and the wrong runs that must fail it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import typer

from bench.convergence.data import corpus
from bench.convergence.gate import LIMIT, Curve, Noise, Verdict, judge
from bench.convergence.model import Size
from bench.convergence.train import Runs, train_all
from bench.convergence.trainers import LEARNING_RATE
from bench.convergence.variants import FAULTS
from bench.loopback import run_on_loopback
from bench.report import Report, say
from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE

RANKS = 4
_PRECISIONS = {"fp32": False, "bf16": True}
_QUICK_STEPS = 40
_LIMIT_S = 3600.0  # of the ranks of one precision: on a busy machine a step takes many times what it does on a free one

StepsOption = Annotated[int, typer.Option("--steps", min=10, help="Optimizer steps of every run.")]


def benchmark(*, quick: bool = False, steps: StepsOption = 1000) -> Report:
    """Loss curves on real text: ours against FSDP2, DDP and Megatron DDP, and against the noise between those.

    Fails unless ours passes the gate in fp32 and in bf16 and three wrong runs fail it.
    """
    steps = min(steps, _QUICK_STEPS) if quick else steps
    size, tokens = Size(), corpus()
    report = Report("convergence", environment=_conditions(size, steps))
    runs: dict[str, Runs] = {}
    for precision, mixed in _PRECISIONS.items():
        say(f"convergence: {precision}, {steps} steps on {RANKS} ranks")
        found = run_on_loopback(
            train_all, nprocs=RANKS, timeout_s=_LIMIT_S, corpus=tokens, size=size, steps=steps, mixed=mixed
        )
        runs[precision] = found[0]
    report.failures += fill(report, runs)
    return report


def _conditions(size: Size, steps: int) -> dict[str, Any]:
    return {
        "ranks": RANKS,
        "steps": steps,
        "transport_asked_for": os.environ.get(TRANSPORT_VARIABLE) or "auto",
        "learning_rate": LEARNING_RATE,
        "layers": size.layers,
        "dim": size.dim,
        "sequence": size.length,
        "sequences_per_step": size.batch * size.micro_batches * RANKS,
        "limit": LIMIT,
    }


def fill(report: Report, runs: Mapping[str, Runs]) -> list[str]:
    """Puts rows, ratios and notes of `runs` (by precision) into `report`; returns what failed, as sentences.

    A ratio without a precision in its name is that of the worse precision.
    """
    failures: list[str] = []
    verdicts: dict[str, Verdict] = {}
    for precision, each in runs.items():
        noise = Noise.between(each.stock)
        verdicts[precision] = verdict = judge(each.ours, each.stock, noise)
        report.rows += _rows(precision, each, noise)
        report.notes.append(_noise_note(precision, noise))
        if not verdict.passes:
            failures.append(f"{precision}: ours is further from stock runs than {LIMIT:g} times their noise: {verdict}")
        for fault, curve in each.wrong.items():
            if judge(curve, each.stock, noise).passes:
                failures.append(f"{precision}: the gate let a wrong run pass in which {FAULTS[fault]}")
        report.rounds.append({"precision": precision, "losses": _sampled({**each.stock, "ours": each.ours})})
    for key, values in {
        "loss_diff_vs_stock_noise": {p: v.loss_ratio for p, v in verdicts.items()},
        "weight_diff_vs_stock_noise": {p: v.weight_ratio for p, v in verdicts.items()},
    }.items():
        report.ratios[key] = max(values.values())
        report.ratios |= {f"{key}_{precision}": value for precision, value in values.items()}
    report.environment["passed"] = not failures
    report.environment["pearson"] = min(verdict.pearson for verdict in verdicts.values())
    good = f"Ours passes the gate (at most {LIMIT:g} times the noise) and every wrong run fails it."
    report.notes += failures or [good]
    report.notes.append("A wrong run ends when its loss difference has reached what fails.")
    return failures


def _rows(precision: str, runs: Runs, noise: Noise) -> list[dict[str, Any]]:
    curves = {**runs.stock, "ours": runs.ours, **runs.wrong}
    rows = []
    for name, curve in curves.items():
        others = {key: value for key, value in runs.stock.items() if key != name}
        verdict = judge(curve, others, noise)
        passes = "stock" if name in runs.stock else "passes" if verdict.passes else "fails"
        rows.append(
            {
                "precision": precision,
                "run": name,
                "steps": len(curve.losses),
                "last_loss": float(curve.losses[-1]),
                "loss_diff_vs_noise": verdict.loss_ratio,
                "weight_diff_vs_noise": verdict.weight_ratio if curve.weights.size else None,
                "pearson": round(verdict.pearson, 9),
                "gate": passes,
                "seconds": round(runs.seconds[name], 1),
            }
        )
    return rows


def _noise_note(precision: str, noise: Noise) -> str:
    note = f"{precision}: stock runs differ by at most {noise.loss:.3g} in loss and {noise.weight:.3g} in a weight."
    if noise.equal_pairs:
        pairs = ", ".join(" and ".join(pair) for pair in noise.equal_pairs)
        note += f" Equal bit by bit, hence no measure of noise: {pairs}."
    if noise.loss == 0 or noise.weight == 0:
        note += " The noise is zero, so ours passes only where it equals stock bit by bit (ratio 0, else infinite)."
    return note


def _sampled(curves: Mapping[str, Curve], points: int = 50) -> dict[str, list[float]]:
    """At most `points` losses of each curve, evenly spaced, the last one included."""
    sampled = {}
    for name, curve in curves.items():
        steps = np.unique(np.linspace(0, len(curve.losses) - 1, points).round().astype(int))
        sampled[name] = [round(float(loss), 6) for loss in curve.losses[steps]]
    return sampled
