"""A record of what the engine issued, as the table of `docs/schedule.md`.

Three columns play the three streams: compute (forward and backward of units, and what they wait for), intra
(collectives inside a supernode), inter (collectives between supernodes). Rows are in the order in which the computing
thread decides them. An entry of the inter column runs behind the last reduce-scatter of its bucket and beside
everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

STREAMS = ("compute", "intra", "inter")


@dataclass(frozen=True)
class Entry:
    """One event.

    Attributes:
        stream: One of `STREAMS`.
        event: What happens, e.g. "all-gather".
        units: Names of the units that it concerns.
    """

    stream: str
    event: str
    units: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.event} {' + '.join(self.units)}".rstrip()


@dataclass
class Schedule:
    """Events of one root module on this rank, in order."""

    entries: list[Entry] = field(default_factory=list)

    def note(self, stream: str, event: str, units: Sequence[str] = ()) -> None:
        """Adds an event."""
        self.entries.append(Entry(stream, event, tuple(units)))

    def table(self) -> str:
        """The events as a Markdown table, one row each, one column per stream."""
        lines = [f"| {' | '.join(STREAMS)} |", "|" + "---|" * len(STREAMS)]
        for entry in self.entries:
            cells = [str(entry) if stream == entry.stream else "" for stream in STREAMS]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)
