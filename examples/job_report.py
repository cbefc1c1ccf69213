"""The table, the checks and the picture at the end of the main job."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from job_runner import RunLog
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One finished run with what its ranks measured.

    Attributes:
        title: Row of the table.
        log: What it printed.
        metrics: One entry per rank, see ``step_metrics.py``.
    """

    title: str
    log: RunLog
    metrics: Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Check:
    """A statement about the runs that holds or not."""

    statement: str
    holds: bool
    found: str


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The JSON lines that the ranks of one run appended."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def largest_difference(found: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """Largest relative difference over the iterations of ``found``; NaN-safe, infinite if one is missing."""
    worst = 0.0
    for iteration, loss in found.items():
        if iteration not in expected:
            return float("inf")
        difference = abs(loss - expected[iteration]) / abs(expected[iteration])
        worst = difference if not difference <= worst else worst
    return worst if found else float("inf")


def table(results: Sequence[Result], iterations: Sequence[int]) -> Table:
    """One row per run; the first result is the one that others are compared with."""
    made = Table(title="GPT on the Python standard library's sources, byte by byte", title_justify="left")
    made.add_column("run")
    for name in (*(f"loss at {i}" for i in iterations), "validation", "largest difference", "step (median)",
                 "peak memory", "inside supernodes", "between supernodes"):
        made.add_column(name, justify="right")
    for result in results:
        log = result.log
        losses = (f"{log.losses[i]:.6f}" if i in log.losses else "-" for i in iterations)
        difference = "" if result is results[0] else f"{largest_difference(log.losses, results[0].log.losses):.1e}"
        validation = log.evaluations.get("validation")
        made.add_row(
            result.title, *losses, "-" if validation is None else f"{validation:.6f}", difference,
            f"{statistics.median(log.step_ms.values()):.0f} ms",
            _largest(result, "peak_bytes"), _sum(result, "intra_bytes"), _sum(result, "inter_bytes"))
    made.caption = ("largest difference: relative, to stock, over all iterations; peak memory: largest of any rank, above "
                    "the imported libraries; bytes: sent by all ranks together in one step")
    made.caption_justify = "left"
    return made


def plot(results: Sequence[Result], path: Path) -> None:
    """Loss curves above, relative differences to the first result below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    reference = results[0].log.losses
    for number, result in enumerate(results):
        losses = result.log.losses
        style = {"linewidth": (4.0, 2.0, 1.5)[min(number, 2)], "linestyle": ("-", "-", "--")[min(number, 2)]}
        above.plot(list(losses), list(losses.values()), label=result.title, alpha=0.9, **style)
        if number:
            shared = [i for i in losses if i in reference]
            below.plot(shared, [abs(losses[i] - reference[i]) / reference[i] for i in shared], label=result.title,
                       color=above.lines[-1].get_color(), **style)
    above.set(ylabel="training loss (nats per byte)", title="HyperFSDP and stock Megatron DDP, same seed")
    below.set(ylabel="relative difference to stock", xlabel="iteration", yscale="symlog")
    below.set_yscale("symlog", linthresh=1e-7)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_checks(console: Console, checks: Sequence[Check]) -> bool:
    """Print one line per check; returns whether all hold."""
    for check in checks:
        mark = "[green]ok[/]" if check.holds else "[bold red]FAILED[/]"
        console.print(f"{mark:>4}  {check.statement}: {check.found}")
    return all(check.holds for check in checks)


def _largest(result: Result, key: str) -> str:
    return _bytes(max(entry[key] for entry in result.metrics)) if result.metrics else "-"


def _sum(result: Result, key: str) -> str:
    return _bytes(sum(entry[key] for entry in result.metrics)) if result.metrics else "-"


def _bytes(number: float) -> str:
    return f"{number / 2**20:.1f} MiB"
