"""`python -m bench memory`: peaks of tensors in every case, and of whole supernodes, against the formula and FSDP2."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import typer

from bench.errors import UnavailableError
from bench.fsdp_step.settings import load
from bench.loopback import run_on_loopback
from bench.memory import supernode
from bench.memory.cases import BUCKET_BYTES, CASES, MESH, SIZE, Case
from bench.memory.formula import Moment, peak
from bench.memory.model import units
from bench.memory.pss import why_unavailable
from bench.memory.supernode import ALLOCATORS, GLIBC, Steps, measure_supernodes
from bench.memory.worker import activation_bytes, measure_all
from bench.report import Report, say

_LIMIT_S = 600.0
PARTS = ("tensors", "supernode")
SHAPES, QUICK_SHAPES = "1x4,2x2", "1x4"
ROUNDS = 2
STEPS, QUICK_STEPS = Steps(warm_up=2, measured=3), Steps(warm_up=1, measured=2)

PartsOption = Annotated[str, typer.Option("--parts", help="tensors, supernode, or both with a comma.")]
ShapesOption = Annotated[str, typer.Option("--shapes", help="Of the part supernode: supernodes x ranks, with commas.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Of the part supernode; 0: the default.")]


def benchmark(
    *,
    quick: bool = False,
    parts: PartsOption = "tensors,supernode",
    shapes: ShapesOption = "",
    rounds: RoundsOption = 0,
) -> Report:
    """Peak bytes: of live tensors per rank against the closed form, and of whole supernodes; both against torch FSDP2.

    Args:
        quick: fewer cases; a smaller model, one round of one shape, malloc as it comes.
        parts: what is measured.
        shapes: of the part "supernode".
        rounds: of the same.
    """
    chosen = [part.strip() for part in parts.split(",") if part.strip()]
    if not chosen or set(chosen) - set(PARTS):
        raise UnavailableError(f"--parts {parts!r}: write {' or '.join(PARTS)}, or both with a comma")
    wanted = _shapes(shapes or (QUICK_SHAPES if quick else SHAPES))
    if "supernode" in chosen and (reason := why_unavailable()):
        raise UnavailableError(reason)
    report = Report("memory", environment=_conditions())
    if "tensors" in chosen:
        _measure_tensors(report, CASES[::2] if quick else CASES)
    if "supernode" in chosen:
        measure_supernodes(
            report,
            load(),
            size=supernode.QUICK_SIZE if quick else supernode.SIZE,
            shapes=wanted,
            allocators=[GLIBC] if quick else list(ALLOCATORS),
            rounds=rounds or (1 if quick else ROUNDS),
            steps=QUICK_STEPS if quick else STEPS,
        )
    return report


def _shapes(text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word.strip()) for word in text.split(",")]
    shapes = [(int(match[1]), int(match[2])) for match in found if match]
    if len(shapes) < len(found) or any(ranks < 2 for _, ranks in shapes):
        raise UnavailableError(f"--shapes {text!r}: write supernodes x ranks of at least 2 ranks each, such as 1x4,2x2")
    return shapes


def _measure_tensors(report: Report, cases: tuple[Case, ...]) -> None:
    say(f"memory: {len(cases)} cases on {math.prod(MESH)} ranks")
    by_rank = run_on_loopback(measure_all, nprocs=math.prod(MESH), timeout_s=_LIMIT_S, cases=cases)
    peaks = [
        {engine: max(rank[index][engine] for rank in by_rank) for engine in ("ours", "fsdp2")}
        for index in range(len(cases))
    ]
    fill(report, cases, peaks, [expected(case) for case in cases])


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
    report.notes += [
        f"peak_vs_formula is that of the case furthest from 1 ({worst}); peak_vs_fsdp2 the largest of all cases.",
        how,
        "Not seen: memory that gloo allocates for itself, for either engine. On gloo FSDP2 is synchronous.",
    ]
