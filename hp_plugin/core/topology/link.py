"""What the link under a process group delivers, measured, and the message size that suits it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_plugin.core.devices import backend_capabilities, get_device

_REPEATS = 3
_PROBE_BYTES = 1 << 20
_SMALLEST_MESSAGE, _LARGEST_MESSAGE = 1 << 20, 64 << 20
_LATENCIES_PER_MESSAGE = 4
"""A message takes at least this many latencies, so that latency is at most a fifth of the time of a lone message."""


@dataclass(frozen=True)
class Link:
    """An all-reduce over the link takes about `latency + bytes / bandwidth`.

    Attributes:
        latency: Seconds that an all-reduce of four bytes takes.
        bandwidth: Bytes of operand per second of an all-reduce, latency apart.
    """

    latency: float
    bandwidth: float

    @property
    def message_bytes(self) -> int:
        """Operand size from which bandwidth, not latency, decides: a power of two between 1 and 64 MiB.

        A power of two, so that two measurements of the same link nearly always agree and a run can be repeated.
        """
        wanted = self.latency * self.bandwidth * _LATENCIES_PER_MESSAGE
        bounded = min(max(wanted, _SMALLEST_MESSAGE), _LARGEST_MESSAGE)
        return 1 << (int(bounded).bit_length() - 1)

    def __str__(self) -> str:
        return f"latency {self.latency * 1e3:.2f} ms, bandwidth {self.bandwidth / 1e6:.0f} MB/s"


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link | None:
    """Times a few small all-reduces; takes about ten latencies and 4 MiB of traffic.

    Every rank of `group` must call, at the same place among the group's collectives; all get the same answer: the
    worst of what the ranks measured. None where the back end moves nothing (torch's fake process group).

    Args:
        group: Ranks on the two or more ends of the link.
        device: Device of the operands.
    """
    if backend_capabilities(group).backend == "fake":
        return None
    latency = _fastest_all_reduce(4, group, device)
    transfer = max(_fastest_all_reduce(_PROBE_BYTES, group, device) - latency, 1e-6)
    worst = torch.tensor([latency, transfer], dtype=torch.float64)
    worst = worst.float().to(device) if device.type != "cpu" else worst
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    latency, transfer = worst.tolist()
    return Link(latency=latency, bandwidth=_PROBE_BYTES / transfer)


def _fastest_all_reduce(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    probe = torch.zeros(num_bytes // 4, device=device)
    fastest = float("inf")
    # The first one waits for the slowest rank and opens connections; it is not counted.
    for attempt in range(_REPEATS + 1):
        start = time.perf_counter()
        dist.all_reduce(probe, group=group)
        get_device(device.type).synchronize()
        if attempt > 0:
            fastest = min(fastest, time.perf_counter() - start)
    return fastest
