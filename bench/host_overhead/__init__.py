"""Host time per layer of plain modules, torch FSDP2 and this project, where communication costs nothing."""

from __future__ import annotations

from bench.host_overhead.command import benchmark

__all__ = ["benchmark"]
