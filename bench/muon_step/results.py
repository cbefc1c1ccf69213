"""From rounds and plans to rows, ratios and notes."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from bench import paired
from bench.errors import BenchError
from bench.fsdp_step.model import Transformer
from bench.muon_step.job import Equality, Job, Result, Round
from bench.muon_step.planned import FEWEST_MATRICES, Planned, least_received, planned_figures
from bench.muon_step.recorded import complaints, read_record
from bench.muon_step.settings import OURS
from bench.muon_step.variant import is_matrix
from bench.report import Report, say

if TYPE_CHECKING:
    from bench.muon_step.command import Plan

_BYTES_PER_ELEMENT = 2  # matrices travel in bf16
_NOTES = (
    (
        "window_ms is from the moment when a rank has the last gradient of a matrix until the first layer of its next "
        "forward begins: reductions not yet done, momentum, Newton-Schulz, all exchanges, the other parameters' AdamW, "
        "and the gather of what that layer needs. What is gathered beside later layers is in step_ms alone."
    ),
    (
        "All run 5 steps of the classic quintic in bf16, Nesterov, momentum as a moving average, and the scale "
        "sqrt(max(1, rows / columns)); gradients are reduced in fp32."
    ),
    "Link megabytes are what a supernode sends per step, from the kernel's counters, without protocol headers.",
    (
        "host_cpu_ms is CPU time per step, user and system, of all threads of all ranks: modelled layers sleep, so "
        "most of it is Newton-Schulz and communication."
    ),
    "On gloo FSDP2 is synchronous, and so are the collectives of its DTensors; this says nothing about GPU or NPU.",
)


def make_report(plan: Plan, job: Job, result: Result) -> Report:
    """The report of a run.

    Raises:
        BenchError: weights or losses differ between variants.
    """
    own = plan.settings
    require_equality(result.equality, weights=own.equality_tolerance, losses=own.loss_tolerance)
    good = kept(result.rounds)
    report = Report("muon-step", environment={**plan.describe(), **_environment(job, result)})
    report.rows += [_row(entry.name, good, result) for entry in job.variants]
    report.rounds += [one.model_dump(mode="json") for one in result.rounds]
    if good:
        _add_times(report, job, good, result)
    else:
        say("no round was kept: the machine drifts; run again when it is quiet")
    _add_plans(report, planned_figures(steps=own.muon.steps))
    _add_counters(report, job, result)
    report.notes.append(_about_equality(job, result))
    report.notes += _NOTES
    report.notes.append(_about_options(plan))
    return report


def require_equality(equality: dict[str, Equality], *, weights: float, losses: float) -> None:
    """Demands the losses and the weights of ours of every variant.

    Args:
        equality: by variant; ours among them.
        weights: relative tolerance of a weight's change, in norm.
        losses: relative tolerance of a loss.

    Raises:
        BenchError: one differs by more.
    """
    wanted = equality[OURS]
    for name, one in equality.items():
        if not one.difference <= weights:
            raise BenchError(
                f"{name} changed the weight {one.parameter} otherwise than {OURS} did: they are {one.difference:.3g} "
                f"apart relative to the change, expected at most {weights:g}. One of the two has another optimizer, so "
                "no time is reported"
            )
        for step, (a, b) in enumerate(zip(wanted.losses, one.losses, strict=True)):
            if not abs(a - b) <= losses * abs(a):
                raise BenchError(
                    f"in step {step} the loss of {name} is {b!r}, that of {OURS} {a!r}; expected at most {losses:g} "
                    "relative between them. One of the two trains another model, so no time is reported"
                )


def kept(rounds: list[Round]) -> list[Round]:
    """The rounds that count."""
    return paired.select(rounds, lambda one: one.kept).kept


def _environment(job: Job, result: Result) -> dict[str, Any]:
    return {
        "options": {entry.name: entry.options for entry in job.variants},
        "facts": result.facts,
        "equality": {name: one.model_dump(mode="json") for name, one in result.equality.items()},
        "counters": result.counters,
        "parameters": result.parameters,
        "matrices": [list(shape) for shape in matrix_shapes(job)],
        "unavailable": result.unavailable,
    }


def matrix_shapes(job: Job) -> list[tuple[int, int]]:
    """Of all that Muon has in the benchmark's model."""
    import torch

    with torch.device("meta"):
        named = list(Transformer(job.size, None).named_parameters())
    return [(p.shape[0], p.shape[1]) for name, p in named if is_matrix(name, p)]


def _row(name: str, good: list[Round], result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": name}
    if name in result.unavailable:
        return row | {"not run": result.unavailable[name]}
    if good:
        row |= {
            "window_ms": statistics.median(one.windows[name] for one in good) * 1e3,
            "step_ms": statistics.median(one.times[name] for one in good) * 1e3,
            "host_cpu_ms": statistics.median(one.host_cpu[name] for one in good) * 1e3,
            "link_mb": statistics.median(one.link_bytes[name] for one in good) / 1e6,
        }
    return row | {
        "weights_differ": result.equality[name].difference,
        "rounds": len(good),
        "rejected": len(result.rounds) - len(good),
    }


def _add_times(report: Report, job: Job, good: list[Round], result: Result) -> None:
    for name in (entry.name for entry in job.variants if entry.name not in result.unavailable):
        if name != OURS:
            report.add_ratio(f"muon_vs_{name}", paired.ratios([one.windows for one in good], OURS, name))
            report.add_ratio(f"train_step_muon_vs_{name}", paired.ratios([one.times for one in good], OURS, name))
    wires = [seconds for one in good for seconds in one.wire]
    report.environment["wire_ms"] = round(statistics.median(wires) * 1e3, 1)


def _add_plans(report: Report, planned: list[Planned]) -> None:
    for one in planned:
        report.rows.append(
            {
                "variant": f"plan: {one.name}, {one.shards} shards x {one.replicas} replicas",
                "matrices_per_rank": one.matrices_per_rank,
                "bytes_vs_bound": one.bytes_vs_lower_bound,
                "flops_imbalance": one.flops_imbalance,
            }
        )
    bytes_ratios = [one.bytes_vs_lower_bound for one in planned if one.bytes_vs_lower_bound is not None]
    even = [one.flops_imbalance for one in planned if one.matrices_per_rank >= FEWEST_MATRICES]
    report.ratios["bytes_vs_lower_bound"] = furthest_from_one(bytes_ratios)
    report.ratios["flops_imbalance"] = max(even)
    report.notes.append(
        "bytes_vs_lower_bound is the value furthest from 1 of all plans and of the run; flops_imbalance the largest of "
        f"the plans with at least {FEWEST_MATRICES} matrices a rank."
    )


def _add_counters(report: Report, job: Job, result: Result) -> None:
    """What ours counted in its last step, against the bound."""
    if not result.counters:
        return
    ranks = len(result.counters)
    replicas = int(report.environment["supernodes"])
    elements = sum(rows * columns for rows, columns in matrix_shapes(job))
    bound = least_received(elements, shards=ranks // replicas, replicas=replicas) * _BYTES_PER_ELEMENT
    received = sum(each["received_bytes"] for each in result.counters)
    flops = [each["flops"] for each in result.counters]
    measured = received / bound
    report.rows.append(
        {
            "variant": f"{OURS}, counted in the run",
            "matrices_per_rank": sum(each["newton_schulz_calls"] for each in result.counters) / ranks,
            "bytes_vs_bound": measured,
            "flops_imbalance": max(flops) * ranks / sum(flops),
        }
    )
    report.ratios["bytes_vs_lower_bound"] = furthest_from_one([report.ratios["bytes_vs_lower_bound"], measured])


def furthest_from_one(values: list[float]) -> float:
    """The value of which the bound is broken or missed most."""
    return max(values, key=lambda value: abs(value - 1.0))


def _about_equality(job: Job, result: Result) -> str:
    largest = max(one.difference for one in result.equality.values())
    return (
        f"After {job.equality_steps} steps of real compute the weights of all variants had changed alike: largest "
        f"relative difference of a change, in norm, {largest:.1e}."
    )


def _about_options(plan: Plan) -> str:
    found = complaints(plan.settings, read_record())
    if found:
        return f"Options that the recorded sweep does not support: {'; '.join(found)}."
    return "Every variant runs the options that were best for it in the recorded sweep."
