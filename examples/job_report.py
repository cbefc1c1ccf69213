"""The table, the checks and the picture at the end of the main job."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """One column per run; the first one is what the others are compared with."""
    made = Table(title="GPT on the Python standard library's sources, byte by byte", title_justify="left")
    made.add_column("")
    for result in results:
        made.add_column(result.title, justify="right")
    for iteration in iterations:
        made.add_row(f"loss at {iteration}", *(_loss(result.log.losses.get(iteration)) for result in results))
    made.add_row("validation loss", *(_loss(result.log.evaluations.get("validation")) for result in results))
    stock = results[0].log.losses
    made.add_row(
        "largest relative difference to stock",
        "",
        *(f"{largest_difference(result.log.losses, stock):.1e}" for result in results[1:]),
    )
    made.add_section()
    made.add_row("step time, median", *(f"{statistics.median(r.log.step_ms.values()):.0f} ms" for r in results))
    made.add_row(
        "peak memory of a rank above its libraries", *(_bytes(_over_ranks(r, "peak_bytes", max)) for r in results)
    )
    made.add_row("sent inside supernodes per step", *(_bytes(_over_ranks(r, "intra_bytes", sum)) for r in results))
    made.add_row("sent between supernodes per step", *(_bytes(_over_ranks(r, "inter_bytes", sum)) for r in results))
    made.caption = "Bytes are those of ring algorithms, all ranks together."
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
            below.plot(
                shared,
                [abs(losses[i] - reference[i]) / reference[i] for i in shared],
                color=above.lines[-1].get_color(),
                **style,
            )
    above.set(ylabel="training loss (nats per byte)", title="HyperFSDP and stock Megatron DDP, same seed")
    below.set(ylabel="relative difference to stock", xlabel="iteration")
    below.set_yscale("symlog", linthresh=1e-7)  # equal to the last printed digit is a difference of 0
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def print_checks(console: Console, checks: Sequence[Check]) -> bool:
    """Print one line per check; returns whether all hold."""
    for check in checks:
        mark = "[green]ok[/]" if check.holds else "[bold red]FAILED[/]"
        console.print(f"{mark:>4}  {check.statement}: {check.found}")
    return all(check.holds for check in checks)


def _over_ranks(result: Result, key: str, combine: Callable[[Iterable[float]], float]) -> float | None:
    values = [entry[key] for entry in result.metrics if key in entry]
    return combine(values) if values else None


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.6f}"


def _bytes(number: float | None) -> str:
    return "-" if number is None else f"{number / 2**20:.1f} MiB"
