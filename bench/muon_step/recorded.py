"""The recorded sweep, and whether the options in force are its best."""

from __future__ import annotations

import json
from typing import Any

from bench.muon_step.settings import SWEEP_FILE, Settings

AS_GOOD = 1.03
"""Options within this factor of the best figure count as the best: the rest is noise."""
FIGURES = ("step_ms", "window_ms")


def read_record() -> dict[str, Any]:
    """What sweep.json holds, by variant; empty before the first sweep."""
    return dict(json.loads(SWEEP_FILE.read_text())) if SWEEP_FILE.exists() else {}


def complaints(settings: Settings, record: dict[str, Any]) -> list[str]:
    """Sentences about options in force that the recorded sweep does not call the best, or nearly so, in each figure."""
    found = []
    for name, own in settings.variants.items():
        if not own.sweep:
            continue
        candidates = [each for each in record.get(name, {}).get("candidates", []) if "step_ms" in each]
        if not candidates:
            found.append(f"{name}: sweep.json has no figures; run python -m bench muon-step --sweep --peers {name}")
            continue
        chosen = [each for each in candidates if each["options"] == own.options]
        if not chosen:
            found.append(f"{name}: the options in force, {own.options}, are not among those that were swept")
            continue
        for figure in FIGURES:
            best = min(candidates, key=lambda each: float(each[figure]))
            if chosen[0][figure] > AS_GOOD * best[figure]:
                found.append(
                    f"{name}: settings.yaml has {own.options} with {figure} {chosen[0][figure]:.0f}; the sweep's best "
                    f"is {best['options']} with {best[figure]:.0f}"
                )
    return found
