"""The recorded sweep, and whether the options in force are its best."""

from __future__ import annotations

import json
from typing import Any

from bench.fsdp_step.settings import SWEEP_FILE, Settings

OPTIONAL = frozenset({"deepspeed_zero3"})
"""Variants that need no figures, because they run only where their package is installed."""
AS_GOOD = 1.03
"""Options within this factor of the best figure count as the best: the rest is noise."""


def read_record() -> dict[str, Any]:
    """What sweep.json holds, by variant; empty before the first sweep."""
    return dict(json.loads(SWEEP_FILE.read_text())) if SWEEP_FILE.exists() else {}


def complaints(settings: Settings, record: dict[str, Any]) -> list[str]:
    """Sentences about options in force that the recorded sweep does not call the best, or nearly so."""
    found = []
    for name, own in settings.variants.items():
        if not own.sweep:
            continue
        candidates = record.get(name, {}).get("candidates", [])
        if not candidates and name in OPTIONAL:
            continue
        if not candidates:
            found.append(f"{name}: sweep.json has no figures; run python -m bench fsdp-step --sweep --peers {name}")
            continue
        best = min(candidates, key=lambda figure: float(figure["over_compute"]))
        chosen = [figure for figure in candidates if figure["options"] == own.options]
        if not chosen:
            found.append(f"{name}: the options in force, {own.options}, are not among those that were swept")
        elif chosen[0]["over_compute"] > AS_GOOD * best["over_compute"]:
            found.append(
                f"{name}: settings.yaml has {own.options} with {chosen[0]['over_compute']:.3f} of compute; the sweep's "
                f"best is {best['options']} with {best['over_compute']:.3f}"
            )
    return found
