"""What a piece of work says when it fails, as text that a rank can hand back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def told(work: Callable[[], Any]) -> str:
    """Type and message of what `work` raises; "runs" where it does not."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "runs"
