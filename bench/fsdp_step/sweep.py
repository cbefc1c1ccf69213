"""`python -m bench fsdp-step --sweep`: every variant tries its own options, and the figures are kept in sweep.json."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bench.errors import UnavailableError
from bench.fsdp_step.job import VariantJob
from bench.fsdp_step.recorded import complaints, read_record
from bench.fsdp_step.results import kept, require_equality
from bench.fsdp_step.settings import FLOOR, MOST_RESIDENT, OURS, SWEEP_FILE, Options
from bench.recorded import write_record
from bench.report import Report, say

if TYPE_CHECKING:
    from bench.fsdp_step.command import Plan

BALANCE = "c1"
ROUNDS = 4


def run_sweep(plan: Plan, *, only: list[str]) -> Report:
    """Measure all candidates of each variant at balance c1; write sweep.json; say what settings.yaml should change.

    Args:
        plan: of the command line.
        only: variants to sweep, the others keep their figures; empty: all that have candidates.
    """
    names = [name for name, own in plan.settings.variants.items() if own.sweep and (not only or name in only)]
    if not names:
        raise UnavailableError(f"none of {only} has a sweep in settings.yaml")
    record = read_record()
    report = Report("fsdp-step", environment=plan.describe())
    for name in names:
        figures = _sweep_one(plan, name)
        if not figures:
            continue
        record[name] = {"conditions": {**_conditions(plan), "rounds": ROUNDS}, "candidates": figures}
        write_record(SWEEP_FILE, record)
        report.rows += [
            {"variant": name, **{key: value for key, value in figure.items() if key != "options"}} | _flat(figure)
            for figure in figures
        ]
        best = min(figures, key=lambda figure: float(figure["over_compute"]))
        say(f"{name}: best {best['options']}, {best['step_ms']:.0f} ms, {best['over_compute']:.3f} of compute")
    report.notes += complaints(plan.settings, record) or ["settings.yaml names the best options of every sweep."]
    return report


def _sweep_one(plan: Plan, name: str) -> list[dict[str, Any]]:
    """Figures of the candidates of one variant, in sets that fit into memory; each set has the floor."""
    figures: list[dict[str, Any]] = []
    candidates = list(enumerate(plan.settings.variants[name].sweep))
    room = MOST_RESIDENT - 1
    for start in range(0, len(candidates), room):
        part = candidates[start : start + room]
        jobs = [VariantJob(name=f"{name}#{index}", kind=name, options=plan.in_force(name, own)) for index, own in part]
        say(f"sweep of {name}: {start + 1} to {start + len(part)} of {len(candidates)}")
        result = plan.execute(plan.job([plan.variant(FLOOR), *jobs], rounds=ROUNDS, balances=[BALANCE]))
        if result.unavailable:
            say(f"{name}: {next(iter(result.unavailable.values()))}")
            return []
        equality = {OURS if job is jobs[0] else job.name: result.equality[job.name] for job in jobs}
        require_equality(equality, tolerance=plan.settings.equality_tolerance, where=name)
        good = kept(result.rounds[BALANCE]) or result.rounds[BALANCE]
        for job, (_, options) in zip(jobs, part):
            figures.append(
                {
                    "options": options,
                    "step_ms": round(statistics.median(one.times[job.name] for one in good) * 1e3, 1),
                    "over_compute": round(statistics.median(one.times[job.name] / one.times[FLOOR] for one in good), 4),
                    "rounds": len(good),
                }
            )
    return figures


def _conditions(plan: Plan) -> dict[str, Any]:
    keys = ("transport_asked_for", "compute", "supernodes", "ranks_per_supernode", "rate_mbit", "delay_ms")
    described = plan.describe()
    return {key: described[key] for key in keys} | {"size": plan.run.size.model_dump(), "balance": BALANCE}


def _flat(figure: dict[str, Any]) -> dict[str, str]:
    options: Options = figure["options"]
    return {"options": ", ".join(f"{key}={value}" for key, value in options.items())}
