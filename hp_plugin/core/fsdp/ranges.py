"""Named ranges in a profiler's trace: which unit is gathered, waited for or reduced, and for what a wait is.

A range costs a function call where nobody profiles. `torch.profiler` shows ranges of the computing thread and of
autograd's; under `torch.autograd.profiler.emit_nvtx()` they appear in Nsight Systems too. Collectives themselves are
named by c10d. What lanes issue happens in their own threads, which torch's profiler leaves out by default.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_NO_RANGE = contextlib.nullcontext()


def profiler_range(event: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """A range `hyperfsdp <event> <name>` around a `with` block, while a profiler records; else nothing.

    Args:
        event: What happens, in the words of `docs/schedule.md`, or "wait".
        name: Of the unit, or the cause of the wait.
    """
    if not torch.autograd._profiler_enabled():
        return _NO_RANGE
    return torch.profiler.record_function(f"hyperfsdp {event} {name}")
