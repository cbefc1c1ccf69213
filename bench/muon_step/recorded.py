"""The recorded sweep of muon-step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import recorded
from bench.muon_step.settings import SWEEP_FILE, Settings

FIGURES = ("step_ms", "window_ms")


def read_record() -> dict[str, Any]:
    """What sweep.json holds, by variant; empty before the first sweep."""
    return recorded.read_record(SWEEP_FILE)


def complaints(settings: Settings, record: Mapping[str, Any]) -> list[str]:
    """See `bench.recorded.complaints`."""
    return recorded.complaints(settings.variants, record, benchmark="muon-step", figures=FIGURES)
