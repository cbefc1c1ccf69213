"""The recorded sweep of fsdp-step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import recorded
from bench.fsdp_step.settings import SWEEP_FILE, Settings

OPTIONAL = frozenset({"deepspeed_zero3"})
"""Variants that need no figures, because they run only where their package is installed."""
FIGURES = ("over_compute",)


def read_record() -> dict[str, Any]:
    """What sweep.json holds, by variant; empty before the first sweep."""
    return recorded.read_record(SWEEP_FILE)


def complaints(settings: Settings, record: Mapping[str, Any]) -> list[str]:
    """See `bench.recorded.complaints`."""
    return recorded.complaints(settings.variants, record, benchmark="fsdp-step", figures=FIGURES, optional=OPTIONAL)
