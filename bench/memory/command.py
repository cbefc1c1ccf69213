"""`python -m bench memory`: peaks of every case, against the formula and FSDP2."""

from __future__ import annotations

import math
from typing import Any

from bench.loopback import run_on_loopback
from bench.memory.cases import BUCKET_BYTES, CASES, MESH, SIZE, Case
from bench.memory.formula import Moment, peak
from bench.memory.model import units
from bench.memory.worker import activation_bytes, measure_all
from bench.report import Report, say

_LIMIT_S = 600.0


def benchmark(*, quick: bool = False) -> Report:
    """Peak bytes of live tensors per rank, against the closed form and torch FSDP2 with the same wrapping."""
    cases = CASES[::2] if quick else CASES
    say(f"memory: {len(cases)} cases on {math.prod(MESH)} ranks")
    by_rank = run_on_loopback(measure_all, nprocs=math.prod(MESH), timeout_s=_LIMIT_S, cases=cases)
    peaks = [
        {engine: max(rank[index][engine] for rank in by_rank) for engine in ("ours", "fsdp2")}
        for index in range(len(cases))
    ]
    report = Report("memory", environment=_conditions())
    fill(report, cases, peaks, [expected(case) for case in cases])
    return report


def _conditions() -> dict[str, Any]:
    root, block = units(SIZE)
    return {
        "mesh": list(MESH),
        "blocks": SIZE.blocks,
        "elements_of_a_block": sum(block),
        "elements_of_the_root": sum(root),
        "bucket_bytes": BUCKET_BYTES,
    }


def expected(case: Case) -> Moment:
    """The formula's peak of a case on the benchmark's model."""
    root, block = units(SIZE)
    activations = activation_bytes(mixed=case.mixed)
    return peak(sum(root), [sum(block)] * SIZE.blocks, case.setting(), activations=activations)


def fill(report: Report, cases: tuple[Case, ...], peaks: list[dict[str, int]], formula: list[Moment]) -> None:
    """Puts rows and ratios into `report`; a ratio is that of the case in which it is worst."""
    against_formula = {}
    against_fsdp2 = {}
    for case, bytes_of, moment in zip(cases, peaks, formula, strict=True):
        against_formula[case.name] = bytes_of["ours"] / moment.total
        against_fsdp2[case.name] = bytes_of["ours"] / bytes_of["fsdp2"]
        report.rows.append(
            {
                "case": case.name,
                "ours_mb": bytes_of["ours"] / 1e6,
                "formula_mb": moment.total / 1e6,
                "fsdp2_mb": bytes_of["fsdp2"] / 1e6,
                "ours_vs_formula": against_formula[case.name],
                "ours_vs_fsdp2": against_fsdp2[case.name],
                "peak_in": moment.name,
            }
        )
    worst = max(against_formula, key=lambda name: abs(math.log(against_formula[name])))
    report.ratios["peak_vs_formula"] = against_formula[worst]
    report.ratios["formula_vs_peak"] = 1 / against_formula[worst]
    report.ratios["peak_vs_fsdp2"] = max(against_fsdp2.values())
    how = (
        "Bytes of the rank with most, in two steady steps. One rank of each shard group is late in every block, so "
        "that reductions stay in flight as long as they are allowed to."
    )
    report.notes = [
        f"peak_vs_formula is that of the case furthest from 1 ({worst}); peak_vs_fsdp2 the largest of all cases.",
        how,
        "Not seen: memory that gloo allocates for itself, for either engine. On gloo FSDP2 is synchronous.",
    ]
