"""What the units have sent, for DeepSpeed's communication logger, which sees only calls of `deepspeed.comm`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from hp_plugin.core.fsdp import Counters


@dataclass(frozen=True)
class _Operation:
    """One kind of collective.

    Attributes:
        name: DeepSpeed's name for it, by which it computes bandwidth.
        count: the field of `Counters` that counts it.
        num_bytes: the field that counts its bytes.
        waits: causes of waits for it.
    """

    name: str
    count: str
    num_bytes: str
    waits: tuple[str, ...]


_OPERATIONS = (
    _Operation("all_gather_into_tensor", "all_gathers", "all_gather_bytes", ("all_gather",)),
    _Operation("reduce_scatter_tensor", "reduce_scatters", "reduce_scatter_bytes", ("reduce_scatter",)),
    _Operation("all_reduce", "all_reduces", "all_reduce_bytes", ("window", "end_of_backward")),
)
_SHORTEST_MS = 1e-3  # DeepSpeed divides by it


class CommunicationLog:
    """Hands the growth of an engine's counters to DeepSpeed's logger, once a step.

    The latency of an entry is how long the computing thread waited for it, not how long it travelled: collectives
    overlap with computation.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def record(self, counters: Counters) -> None:
        """Adds an entry for each collective since the last call, with their mean size and wait."""
        logger: Any = importlib.import_module("deepspeed.comm.comm").comms_logger
        for operation in _OPERATIONS:
            count = int(self._growth(operation.count, getattr(counters, operation.count)))
            num_bytes = self._growth(operation.num_bytes, getattr(counters, operation.num_bytes))
            waited = self._growth(operation.name, sum(counters.waits[cause].seconds for cause in operation.waits))
            if not logger.enabled or count < 1 or not (logger.prof_all or operation.name in logger.prof_ops):
                continue
            for _ in range(count):
                latency = max(1e3 * waited / count, _SHORTEST_MS)
                logger.append(operation.name, f"hyperfsdp {operation.name}", latency, int(num_bytes // count))

    def _growth(self, key: str, value: float) -> float:
        before, self._before[key] = self._before.get(key, 0.0), value
        return value - before
