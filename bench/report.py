"""What a benchmark returns, as a table for people or as one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import paired

Quartiles = tuple[float, float, float]


def say(message: str) -> None:
    """Tell the person who waits; never a part of the result. Goes to standard error."""
    print(message, file=sys.stderr, flush=True)


@dataclass
class Report:
    """The result of one benchmark.

    Attributes:
        name: the benchmark's name on the command line.
        environment: options that were in force and what the testbed delivered; the command line adds the machine.
        rows: the table, one mapping per line. Keys are column titles; units belong into the keys (`step_ms`).
        ratios: ours over the peer's, by key: medians of per-round ratios, so below 1 is better.
        quartiles: (first quartile, median, third quartile) of the same keys. A target holds when the third meets it.
        rounds: raw values, one mapping per round that was run, rejected rounds included and marked as such.
        notes: sentences that a reader of the figures needs, printed below the table.
        failures: what went wrong, as sentences. The report is printed all the same, and the exit code is 1.
    """

    name: str
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, Quartiles] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add_ratio(self, key: str, per_round: Sequence[float]) -> None:
        """Publish per-round ratios under `key`: their median and their quartiles."""
        quartiles = paired.quartiles(per_round)
        self.ratios[key] = quartiles[1]
        self.quartiles[key] = quartiles

    def as_dict(self) -> dict[str, Any]:
        """The JSON object: plain types, in a fixed order of keys, numbers that JSON cannot hold as null."""
        return {
            "name": self.name,
            "environment": _plain(self.environment),
            "rows": _plain(self.rows),
            "ratios": _plain(self.ratios),
            "quartiles": _plain(self.quartiles),
            "rounds": _plain(self.rounds),
            "notes": _plain(self.notes),
            "failures": _plain(self.failures),
        }

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def write(self, directory: Path) -> Path:
        """Write NAME.json, indented, into `directory`, which is made if it is missing. Returns the file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(json.dumps(self.as_dict(), allow_nan=False, indent=1) + "\n")
        temporary.replace(path)
        return path

    def print(self) -> None:
        """Print tables of rows and ratios, then the notes, on standard output."""
        from rich.console import Console

        console = Console()
        if self.rows:
            console.print(_table(self.name, self.rows))
        if self.ratios:
            console.print(_table(f"{self.name}: ours over the peer's (below 1 is better)", self._ratio_rows()))
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def _ratio_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, value in self.ratios.items():
            row: dict[str, Any] = {"ratio": key, "median": value}
            if key in self.quartiles:
                row["lower quartile"], _, row["upper quartile"] = self.quartiles[key]
            rows.append(row)
        return rows


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _plain(value: Any) -> Any:
    """`value` in types that JSON knows; anything else is a mistake of the benchmark and raises TypeError."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(
        f"a report holds {type(value).__name__} ({value!r}); it takes None, bool, int, float, str, lists and mappings. "
        "Convert tensors with .item() or .tolist()."
    )
