"""From rounds to rows, ratios and notes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bench import paired
from bench.errors import BenchError
from bench.fsdp_step.bound import Schedule, schedule_of
from bench.fsdp_step.job import Equality, Job, Result, Round
from bench.fsdp_step.peers import ABLATIONS, ON_C10D
from bench.fsdp_step.recorded import complaints, read_record
from bench.fsdp_step.settings import FLOOR, OURS, OURS_C10D
from bench.fsdp_step.traffic import expected_bytes
from bench.report import Report, say

if TYPE_CHECKING:
    from bench.fsdp_step.command import Plan

BYTES_TOLERANCE = 0.05
ON_GLOO = "on gloo FSDP2 is synchronous; this says nothing about GPU or NPU"
_NOTES = (
    f"Ratios to fsdp2, fsdp2_tuned and fsdp2_hook: {ON_GLOO}.",
    (
        "compute is the step of the floor: the same compute, the optimizer on one rank's share, no communication. wire "
        "is the all-reduce of all gradient shards between supernodes, measured before and after each round."
    ),
    (
        "step_vs_bound is over the closed form of our schedule: forward, then backward beside a first-in-first-out "
        "link, unit by unit, then the optimizer. step_vs_ideal is over max(compute, wire)."
    ),
    "Link bytes are what a supernode sends per step, from the kernel's counters, without protocol headers.",
    (
        "host_cpu_ms is CPU time per step, user and system, of all threads of all ranks together. Modelled compute "
        "sleeps, so it is what communication, the optimizer and the host's own work take; real compute is a part of it."
    ),
)

Found = Mapping[str, tuple[Job, Result]]


def make_report(plan: Plan, found: Found, failures: Mapping[str, str]) -> Report:
    """The report of all sets.

    Raises:
        BenchError: losses or gradient norms differ between variants.
    """
    for name, (_, result) in found.items():
        require_equality(result.equality, tolerance=plan.settings.equality_tolerance, where=name)
    report = Report("fsdp-step", environment=plan.describe())
    measured: dict[str, dict[str, float]] = {}
    for set_name, (job, result) in found.items():
        for balance in result.rounds:
            report.rows += _rows(plan, balance, job, result)
            if good := kept(result.rounds[balance]):
                measured[f"{set_name}/{balance}"] = _describe_balance(good, job, result)
            report.rounds += [
                {"set": set_name, "balance": balance, **one.model_dump(mode="json")} for one in result.rounds[balance]
            ]
    report.environment["measured"] = measured
    report.environment["transport"] = _transport(found)
    report.environment["options"] = {
        entry.name: entry.options for job, _ in found.values() for entry in job.variants if entry.options
    }
    report.notes += [
        f"Measured in {where}: {', '.join(f'{key} {value:g}' for key, value in figures.items())}."
        for where, figures in measured.items()
    ]
    balances = list(dict.fromkeys(balance for _, result in found.values() for balance in result.rounds))
    for balance in balances:
        _add_ratios(report, balance, found)
    _add_equality(report, found)
    report.notes += _NOTES
    report.notes.append(_about_options(plan))
    report.failures += [f"the set {name} did not run to its end: {reason}" for name, reason in failures.items()]
    report.notes += [
        f"{name}: {reason}." for _, result in found.values() for name, reason in result.unavailable.items()
    ]
    _check_bytes(report)
    return report


def require_equality(equality: Mapping[str, Equality], *, tolerance: float, where: str) -> None:
    """Demands the losses and norms of ours of every variant but the floor, which does not reduce its gradients.

    Raises:
        BenchError: one differs by more than the relative `tolerance`.
    """
    wanted = equality[OURS]
    for name, one in equality.items():
        if name == FLOOR:
            continue
        for what, mine, theirs in (("loss", wanted.losses, one.losses), ("gradient norm", wanted.norms, one.norms)):
            for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not abs(a - b) <= tolerance * abs(a):
                    raise BenchError(
                        f"set {where}: in step {step} the {what} of {name} is {b!r}, that of {OURS} {a!r}; expected "
                        f"at most {tolerance:g} relative between them. One of the two trains another model, so no "
                        "time is reported"
                    )


def kept(rounds: list[Round]) -> list[Round]:
    """The rounds that count."""
    return paired.select(rounds, lambda one: one.kept).kept


def schedule_of_round(one: Round, sizes: list[int]) -> Schedule:
    """Inputs of the bound, as measured in this round."""
    forward, backward, update = one.floor_phases
    return schedule_of(
        sizes, layer_s=one.layer, forward_s=forward, backward_s=backward, optimizer_s=update, wire_s=one.wire
    )


def _rows(plan: Plan, balance: str, job: Job, result: Result) -> list[dict[str, Any]]:
    rounds = result.rounds[balance]
    good = kept(rounds)
    rows = []
    for entry in job.variants:
        row: dict[str, Any] = {"balance": balance, "variant": entry.name}
        if entry.name in result.unavailable:
            rows.append(row | {"status": "not run: see the notes"})
            continue
        if "transport" in result.facts.get(entry.name, {}):
            row["transport"] = result.facts[entry.name]["transport"]
        if good:
            row |= _figures(plan, entry.kind, entry.name, good, result)
        rows.append(row | {"rounds": len(good), "rejected": len(rounds) - len(good)})
    return rows


def _figures(plan: Plan, kind: str, name: str, good: list[Round], result: Result) -> dict[str, Any]:
    sent = statistics.median(one.link_bytes[name] for one in good)
    figures: dict[str, Any] = {
        "step_ms": statistics.median(one.times[name] for one in good) * 1e3,
        "over_compute": statistics.median(one.times[name] / one.times[FLOOR] for one in good),
        "host_cpu_ms": statistics.median(one.host_cpu[name] for one in good) * 1e3,
        "link_mb": sent / 1e6,
    }
    expected = expected_bytes(kind, parameters=result.parameters, supernodes=plan.supernodes, ranks=plan.ranks)
    if expected:
        figures["link_vs_formula"] = sent / expected
    return figures


def _describe_balance(rounds: list[Round], job: Job, result: Result) -> dict[str, float]:
    """Medians over the kept rounds of one set and balance, and the inputs of the bound."""

    def median_ms(values: Iterable[float]) -> float:
        return round(statistics.median(values) * 1e3, 2)

    described = {
        "compute_ms": median_ms(one.times[FLOOR] for one in rounds),
        "layer_forward_ms": median_ms(one.layer for one in rounds),
        "forward_ms": median_ms(one.floor_phases[0] for one in rounds),
        "backward_ms": median_ms(one.floor_phases[1] for one in rounds),
        "optimizer_ms": median_ms(one.floor_phases[2] for one in rounds),
        "ours_ms": median_ms(one.times[OURS] for one in rounds),
    }
    if job.nominal_wire_s is None:
        described["wire_ms"] = median_ms(one.wire for one in rounds)
        described["bound_ms"] = median_ms(schedule_of_round(one, result.unit_sizes).step() for one in rounds)
        described["compute_over_wire"] = round(statistics.median(one.times[FLOOR] / one.wire for one in rounds), 3)
    return described


def _add_ratios(report: Report, balance: str, found: Found) -> None:
    every: list[tuple[Round, list[int]]] = []
    for job, result in found.values():
        good = kept(result.rounds.get(balance, []))
        if job.nominal_wire_s is None:
            every += [(one, result.unit_sizes) for one in good]
        if not good:
            say(f"no round of {balance} was kept in one set: the machine drifts; run again when it is quiet")
            continue
        times = [one.times for one in good]
        for name in (entry.name for entry in job.variants if entry.name not in result.unavailable):
            if name in ABLATIONS:
                key = name if balance in ("c1", "real") else f"{balance}_{name}"
                report.add_ratio(key, paired.ratios(times, name, OURS_C10D if name in ON_C10D else OURS))
            elif name not in (FLOOR, OURS):
                report.add_ratio(f"{balance}_step_vs_{name}", paired.ratios(times, OURS, name))
            if name == OURS_C10D:
                spent = paired.ratios([one.host_cpu for one in good], OURS, name)
                report.add_ratio(f"{balance}_host_cpu_vs_c10d", spent)
    if not every:  # nothing kept, or no link to measure
        return
    rounds = [one for one, _ in every]
    bounds = [schedule_of_round(one, sizes).step() for one, sizes in every]
    ideals = [max(one.times[FLOOR], one.wire) for one in rounds]
    report.add_ratio(f"{balance}_step_vs_ideal", [one.times[OURS] / ideal for one, ideal in zip(rounds, ideals)])
    report.add_ratio(f"{balance}_step_vs_bound", [one.times[OURS] / bound for one, bound in zip(rounds, bounds)])
    exposed = [1 - one.times[FLOOR] / one.times[OURS] for one in rounds]
    report.add_ratio(f"{balance}_exposed_comm_fraction", exposed)


def _transport(found: Found) -> str:
    """What ours used inside a supernode, the same in all sets."""
    used = {str(result.facts[OURS]["transport"]) for _, result in found.values()}
    return ", ".join(sorted(used))


def _about_options(plan: Plan) -> str:
    common = "fp32 on every wire, AdamW (fused) everywhere"
    record = read_record()
    found = complaints(plan.settings, record)
    swept = record.get(OURS, {}).get("conditions", {}).get("transport_asked_for", "c10d")
    if swept != plan.transport:
        found.append(f"{OURS}: they were swept with the transport {swept}, and it was asked for {plan.transport} here")
    if found:
        return f"{common}. Options that the recorded sweep does not support: {'; '.join(found)}."
    return f"Every variant runs the options that were best for it in the recorded sweep; {common}."


def _add_equality(report: Report, found: Found) -> None:
    largest = 0.0
    for _, result in found.values():
        wanted = result.equality[OURS]
        for name, one in result.equality.items():
            if name != FLOOR:
                pairs = [*zip(wanted.losses, one.losses), *zip(wanted.norms, one.norms)]
                largest = max([largest, *(abs(a - b) / abs(a) for a, b in pairs)])
    steps = max(len(result.equality[OURS].losses) for _, result in found.values())
    report.environment["largest_relative_difference"] = largest
    report.environment["facts"] = {
        f"{set_name}/{name}": facts for set_name, (_, result) in found.items() for name, facts in result.facts.items()
    }
    report.notes.append(
        f"Losses and gradient norms of all variants agree over {steps} steps; "
        f"largest relative difference {largest:.1e}."
    )


def _check_bytes(report: Report) -> None:
    measured = [row for row in report.rows if "link_vs_formula" in row]
    off = [row for row in measured if not paired.in_balance(row["link_vs_formula"], 1.0, tolerance=BYTES_TOLERANCE)]
    report.environment["link_bytes_agree"] = not off if measured else None
    for row in off:
        report.notes.append(
            f"WARNING: {row['variant']} ({row['balance']}) sent {row['link_mb']:.1f} MB per step over the link, "
            f"{row['link_vs_formula']:.3f} of the closed form."
        )
