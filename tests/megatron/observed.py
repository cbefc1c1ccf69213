"""A rank that trains as the tests do and gives back what the job printed about HyperFSDP."""

from __future__ import annotations

from dataclasses import dataclass

from tests.megatron import training


@dataclass
class Observed:
    """What one rank saw: its run, and what it said itself."""

    run: training.Run
    lines: list[str]


def train(*, argv: list[str]) -> Observed:
    """As `training.train`, with the lines that `reporting.say` printed on this rank."""
    from hp_plugin.megatron import reporting

    said: list[str] = []
    say = reporting.say

    def listening(line: str) -> None:
        said.append(line)
        say(line)

    reporting.say = listening  # type: ignore[assignment]
    return Observed(training.train(argv=argv), said)
