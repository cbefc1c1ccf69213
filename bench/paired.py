"""Paired comparison: variants run interleaved, and are compared inside one round only.

A shared machine drifts by more than most effects that are looked for. Two variants that run within the same second see
the same machine, so the ratio of one round is trustworthy where a ratio of two means is not. Rounds run forwards and
backwards in turn (A B C, C B A), which cancels drift within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def order(variants: Sequence[T], round_index: int) -> list[T]:
    """The order in which `variants` run in a round: as given in even rounds, reversed in odd ones."""
    return list(variants) if round_index % 2 == 0 else list(reversed(variants))


def interleave(variants: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, variant) for `rounds` rounds of all variants, in the order in which they run."""
    for round_index in range(rounds):
        for variant in order(variants, round_index):
            yield round_index, variant


def ratios(times: Sequence[Mapping[str, float]], ours: str, peer: str) -> list[float]:
    """Per-round ratios ours / peer.

    Args:
        times: one mapping variant -> time (any unit) per round.
        ours: the variant in the numerator.
        peer: the variant in the denominator.

    Raises:
        ValueError: there is no round, a round lacks one of the two, or a time is not positive.
    """
    if not times:
        raise ValueError(f"no round holds times of {ours!r} and {peer!r}: run at least one")
    result = []
    for index, row in enumerate(times):
        missing = [name for name in (ours, peer) if name not in row]
        if missing:
            raise ValueError(f"round {index} has no time of {missing[0]!r}; it has {sorted(row)}")
        if row[ours] <= 0 or row[peer] <= 0:
            raise ValueError(f"round {index} has a time that is not positive: {row[ours]} and {row[peer]}")
        result.append(row[ours] / row[peer])
    return result


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated linearly between the sorted values.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("quartiles of no values: at least one round must be kept")
    if len(values) == 1:
        return (float(values[0]),) * 3
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return float(first), float(median), float(third)


@dataclass(frozen=True)
class Selection(Generic[T]):
    """Rounds that count and rounds that do not.

    Attributes:
        kept: rounds that satisfy the rule, in the order in which they ran.
        rejected: the others.
    """

    kept: list[T]
    rejected: list[T]

    def __str__(self) -> str:
        total = len(self.kept) + len(self.rejected)
        return f"{len(self.rejected)} of {total} rounds rejected"


def select(rounds: Sequence[T], keep: Callable[[T], bool]) -> Selection[T]:
    """Split `rounds` by the rule `keep`; a benchmark publishes how many it rejected (`str` of the result)."""
    kept: list[T] = []
    rejected: list[T] = []
    for row in rounds:
        (kept if keep(row) else rejected).append(row)
    return Selection(kept, rejected)


def in_balance(value: float, wanted: float, *, tolerance: float = 0.05) -> bool:
    """Whether `value` lies within the relative `tolerance` of `wanted`: the rule for rounds of a set balance."""
    return abs(value - wanted) <= tolerance * abs(wanted)
