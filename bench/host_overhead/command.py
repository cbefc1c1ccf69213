"""`python -m bench host-overhead`: the measurement and its report."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench import paired
from bench.host_overhead.model import Size
from bench.host_overhead.planned_model import PLAN_SIZE
from bench.host_overhead.plans import PlanEngine, PlanVariant, build_planned, make_planned_input, plan_variants
from bench.host_overhead.steady import MODES, dtensors_of_a_step
from bench.host_overhead.timing import RoundTime, measure
from bench.host_overhead.variants import WORLD_SIZE, Engine, Variant, all_variants, build, fake_ranks, make_input
from bench.report import Report, say


def benchmark(*, quick: bool = False) -> Report:
    """Host time per layer, forward and backward, with a fake process group whose collectives return at once."""
    size = Size()
    rounds, steps = (10, 10) if quick else (30, 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fake_ranks() as meshes:
            say(f"host-overhead: {rounds} rounds of {steps} steps, {len(_variants())} variants")
            models = {str(v): (build(v, meshes, size), make_input(v, size)) for v in all_variants()}
            models |= _planned(meshes["tp_8"])
            times = measure(models, rounds=rounds, steps=steps)
            counts = {str(v): _dtensor_columns(v, meshes, size) for v in all_variants()}
    finally:
        torch.set_num_threads(threads)
    report = Report("host-overhead", environment=_conditions(size, rounds, steps))
    report.rows = [_time_row(v, times, size) | counts.get(str(v), {}) for v in _variants()]
    report.rounds = [{name: _microseconds(t.cpu, size) for name, t in one.items()} for one in times]
    _add_ratios(report, times)
    _add_plan_ratios(report, times)
    report.notes = _notes()
    return report


def _conditions(size: Size, rounds: int, steps: int) -> dict[str, Any]:
    return {
        "world_size": WORLD_SIZE,
        "layers": size.layers,
        "dim": size.dim,
        "tokens": size.tokens,
        "rounds": rounds,
        "steps_per_round": steps,
        "threads": 1,
        "plan_dim": PLAN_SIZE.dim,
        "plan_tokens": PLAN_SIZE.tokens,
    }


def _variants() -> list[Variant | PlanVariant]:
    return [*all_variants(), *plan_variants()]


def _planned(mesh: DeviceMesh) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """The variants on plans; they have as many layers as the others."""
    return {
        str(v): (build_planned(v, mesh, PLAN_SIZE), make_planned_input(v, PLAN_SIZE, mesh.size()))
        for v in plan_variants()
    }


def _microseconds(seconds: float, size: Size) -> float:
    return round(seconds / size.layers * 1e6, 1)


def _time_row(variant: Variant | PlanVariant, times: list[dict[str, RoundTime]], size: Size) -> dict[str, Any]:
    own = [one[str(variant)] for one in times]
    return {
        "variant": str(variant),
        "cpu_min_us": _microseconds(min(t.cpu for t in own), size),
        "cpu_median_us": _microseconds(statistics.median(t.cpu_median for t in own), size),
        "wall_median_us": _microseconds(statistics.median(t.wall for t in own), size),
    }


def _dtensor_columns(variant: Variant, meshes: dict[str, DeviceMesh], size: Size) -> dict[str, Any]:
    if variant.engine == "plain":
        return {}
    found = {}
    for mode in MODES:
        model, x = build(variant, meshes, size), make_input(variant, size)
        found[mode] = dtensors_of_a_step(variant, model, x, mode=mode)
    operations = max(count.operations for count in found.values())
    return {mode: count.total for mode, count in found.items()} | {"dtensor_operations": operations}


def _add_ratios(report: Report, times: list[dict[str, RoundTime]]) -> None:
    """A key without a condition in its name is that of the condition in which it is worst."""
    pairs: list[tuple[str, Engine, Engine]] = [
        ("fsdp_vs_plain", "ours", "plain"),
        ("fsdp2_vs_plain", "fsdp2", "plain"),
        ("fsdp_vs_fsdp2", "ours", "fsdp2"),
    ]
    cpu = [{name: t.cpu for name, t in one.items()} for one in times]
    wall = [{name: t.wall for name, t in one.items()} for one in times]
    conditions = [v for v in all_variants() if v.engine == "ours"]
    for key, first, second in pairs:
        found = {v: paired.ratios(cpu, str(v.peer(first)), str(v.peer(second))) for v in conditions}
        report.add_ratio(key, max(found.values(), key=lambda series: paired.quartiles(series)[2]))
        for variant, series in found.items():
            report.add_ratio(f"{key}_{variant.mesh}_{'bf16' if variant.mixed else 'fp32'}", series)
    elapsed = (paired.ratios(wall, str(v), str(v.peer("fsdp2"))) for v in conditions)
    report.add_ratio("fsdp_vs_fsdp2_wall", max(elapsed, key=lambda series: paired.quartiles(series)[2]))


def _add_plan_ratios(report: Report, times: list[dict[str, RoundTime]]) -> None:
    """As the other keys: the worst condition is the headline."""
    pairs: list[tuple[str, PlanEngine]] = [
        ("plan_vs_handwritten_tp", "handwritten"),
        ("plan_vs_dtensor", "dtensor"),
        ("plan_vs_compute", "compute"),
    ]
    cpu = [{name: t.cpu for name, t in one.items()} for one in times]
    conditions = [v for v in plan_variants() if v.engine == "plan"]
    for key, peer in pairs:
        found = {v: paired.ratios(cpu, str(v), str(v.peer(peer))) for v in conditions}
        report.add_ratio(key, max(found.values(), key=lambda series: paired.quartiles(series)[2]))
        for variant, series in found.items():
            report.add_ratio(f"{key}_{'sequence' if variant.sequence else 'whole'}", series)


def _notes() -> list[str]:
    measured = (
        "Times are microseconds per layer. Ratios are of the least CPU time of a step in a round, all threads of the "
        "process; a key that names no condition is the worst of the conditions, and `_wall` is the median elapsed time."
    )
    counted = (
        "DTensors are counted from outside in a steady step with clipping and optimizer, over all 8 layers: of one "
        "micro-batch, of 3 that are reduced between supernodes with the last, of 3 that are reduced with the last; "
        "dtensor operations: most of the three."
    )
    fake = "The fake process group moves nothing between ranks but fills outputs by local copies of tiny tensors."
    plans = (
        "plan, handwritten and dtensor are one model of the same layers, divided over 8 ranks by a sharding plan, by "
        "collectives in its forwards, by torch's parallelize_module; compute is one rank's part of it alone."
    )
    return [measured, counted, fake, plans]
