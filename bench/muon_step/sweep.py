"""`python -m bench muon-step --sweep`: every variant tries its own options, and the figures are kept in sweep.json."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bench.errors import UnavailableError
from bench.muon_step.job import Result
from bench.muon_step.recorded import complaints, read_record
from bench.muon_step.results import kept, require_equality
from bench.muon_step.settings import OURS, SWEEP_FILE
from bench.recorded import write_record
from bench.report import Report, say
from bench.testbed import RanksFailedError

if TYPE_CHECKING:
    from bench.fsdp_step.job import VariantJob
    from bench.muon_step.command import Plan

ROUNDS = 3
MOST_RESIDENT = 4
"""Candidates in one set of processes."""


def run_sweep(plan: Plan, *, only: list[str]) -> Report:
    """Measure all candidates of each variant; write sweep.json; say what settings.yaml should change.

    Args:
        plan: of the command line.
        only: variants to sweep, the others keep their figures; empty: all that have candidates.
    """
    names = [name for name, own in plan.settings.variants.items() if own.sweep and (not only or name in only)]
    if not names:
        raise UnavailableError(f"none of {only} has a sweep in settings.yaml")
    record = read_record()
    report = Report("muon-step", environment=plan.describe())
    for name in names:
        figures = _sweep_one(plan, name)
        conditions = {"size": plan.run.size.model_dump(), "rate_mbit": plan.rate_mbit, "rounds": ROUNDS}
        record[name] = {"conditions": conditions, "candidates": figures}
        write_record(SWEEP_FILE, record)
        for figure in figures:
            said = ", ".join(f"{key}={value}" for key, value in figure["options"].items())
            report.rows.append({"variant": name, **figure, "options": said})
    report.notes += complaints(plan.settings, record) or ["settings.yaml names the best options of every sweep."]
    return report


def _sweep_one(plan: Plan, name: str) -> list[dict[str, Any]]:
    """Figures of the candidates of one variant, in sets that fit into memory."""
    jobs = [
        plan.variant(name, name=f"{name}#{index}", options=options)
        for index, options in enumerate(plan.settings.variants[name].sweep)
    ]
    figures: list[dict[str, Any]] = []
    for start in range(0, len(jobs), MOST_RESIDENT):
        part = jobs[start : start + MOST_RESIDENT]
        say(f"sweep of {name}: {start + 1} to {start + len(part)} of {len(jobs)}")
        figures += _run_together(plan, part)
    return figures


def _run_together(plan: Plan, jobs: list[VariantJob]) -> list[dict[str, Any]]:
    """Figures of candidates that run in one set of processes; if one fails, of each by itself, or why it has none."""
    try:
        result = plan.execute(plan.job(jobs, rounds=ROUNDS))
    except RanksFailedError as error:
        if len(jobs) == 1:
            return [{"options": jobs[0].options, "failed": _reason(error)}]
        say(f"one of {[job.options for job in jobs]} failed; each runs by itself")
        return [figure for job in jobs for figure in _run_together(plan, [job])]
    for job in jobs:
        if job.name in result.unavailable:
            return [{"options": each.options, "failed": result.unavailable[job.name]} for each in jobs]
    own = plan.settings
    equality = {OURS if job is jobs[0] else job.name: result.equality[job.name] for job in jobs}
    require_equality(equality, weights=own.equality_tolerance, losses=own.loss_tolerance)
    return [_figure(job, result) for job in jobs]


def _figure(job: VariantJob, result: Result) -> dict[str, Any]:
    good = kept(result.rounds) or result.rounds
    return {
        "options": job.options,
        "step_ms": round(statistics.median(one.times[job.name] for one in good) * 1e3, 1),
        "window_ms": round(statistics.median(one.windows[job.name] for one in good) * 1e3, 1),
        "rounds": len(good),
    }


def _reason(error: RanksFailedError) -> str:
    """The last line that the first rank to fail wrote: its exception."""
    if error.timed_out or not error.failed:
        return "it did not finish in time"
    lines = [line for line in error.results[error.failed[0]].stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it left without a message"
