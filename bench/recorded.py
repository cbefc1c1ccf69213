"""Recorded sweeps: what they found, and whether the options in force are their best."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

AS_GOOD = 1.03
"""Options within this factor of the best figure count as the best: the rest is noise."""


class Swept(Protocol):
    """Settings of a variant."""

    @property
    def options(self) -> Mapping[str, Any]:
        """In force."""

    @property
    def sweep(self) -> Sequence[Mapping[str, Any]]:
        """What a sweep tries; empty where there is nothing to try."""


def read_record(path: Path) -> dict[str, Any]:
    """What a sweep.json holds, by variant; empty before the first sweep."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a sweep.json, all or nothing."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def complaints(
    variants: Mapping[str, Swept],
    record: Mapping[str, Any],
    *,
    benchmark: str,
    figures: Sequence[str],
    optional: Collection[str] = (),
) -> list[str]:
    """Sentences about options in force that the recorded sweep does not call the best, or nearly so, in each figure.

    Args:
        variants: Settings of each variant.
        record: As `read_record` gave it. A candidate that could not run has no figures.
        benchmark: Its name on the command line.
        figures: Keys of what is to be small.
        optional: Variants that need no figures.
    """
    found = []
    for name, own in variants.items():
        if not own.sweep:
            continue
        candidates = [each for each in record.get(name, {}).get("candidates", []) if figures[0] in each]
        if not candidates:
            if name not in optional:
                found.append(
                    f"{name}: sweep.json has no figures; run python -m bench {benchmark} --sweep --peers {name}"
                )
            continue
        chosen = [each for each in candidates if each["options"] == own.options]
        if not chosen:
            found.append(f"{name}: the options in force, {own.options}, are not among those that were swept")
            continue
        for figure in figures:
            best = min(candidates, key=lambda each: float(each[figure]))
            if chosen[0][figure] > AS_GOOD * best[figure]:
                found.append(
                    f"{name}: settings.yaml has {own.options} with {figure} {chosen[0][figure]:g}; the sweep's best is "
                    f"{best['options']} with {best[figure]:g}"
                )
    return found
