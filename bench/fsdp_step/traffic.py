"""Bytes that a step puts on the link of a supernode: by the closed form, and by the kernel's counters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bench.fsdp_step.settings import FLOOR

HEADER_BYTES = 66
"""Ethernet 14, IPv4 20, TCP 32 (its time stamps included), once for every packet that the device counts. A packet may
be as large as the 64 KiB that the kernel hands to the device at once; acknowledgements are packets of headers alone."""

_BYTES_PER_ELEMENT = 4  # fp32 on every wire

_FLAT_RING_PASSES = {"torch_ddp": 2, "megatron_ddp": 2, "megatron_distopt": 3}
"""How often a flat ring carries (n-1)/n of the model. An all-reduce is 2. Megatron's distributed optimizer should be 2,
but gloo runs its reduce-scatter as an all-reduce, so with the all-gather of parameters it is 3."""


@dataclass(frozen=True)
class Counted:
    """What the kernel counted on the link of one supernode, sent."""

    bytes: int
    packets: int

    def __sub__(self, earlier: Counted) -> Counted:
        return Counted(self.bytes - earlier.bytes, self.packets - earlier.packets)

    @property
    def payload(self) -> int:
        """Bytes without protocol headers."""
        return self.bytes - HEADER_BYTES * self.packets


def count_link() -> Counted:
    """The counters of this rank's supernode; zeros where it has no link."""
    device = os.environ.get("BENCH_LINK_DEVICE")
    if not device:
        return Counted(0, 0)
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            words = counters.split()
            return Counted(bytes=int(words[8]), packets=int(words[9]))
    raise RuntimeError(f"this process sees no device {device!r}: it must be a rank of a testbed")


def expected_bytes(kind: str, *, parameters: int, supernodes: int, ranks: int) -> float | None:
    """Bytes per step that one supernode sends over its link; None where there is no closed form.

    Two-tier variants reduce shards between supernodes: each of the `ranks` ranks sends 2 (R-1)/R of its shard. Flat
    rings have one edge that leaves each supernode, since ranks are numbered supernode by supernode.

    Args:
        kind: kind of the variant.
        parameters: elements of the model.
        supernodes: R.
        ranks: in each supernode.
    """
    if supernodes == 1 or kind == FLOOR:
        return 0.0
    model = parameters * _BYTES_PER_ELEMENT
    if kind in _FLAT_RING_PASSES:
        world = supernodes * ranks
        return _FLAT_RING_PASSES[kind] * (world - 1) / world * model
    if kind in ("megatron_fsdp", "deepspeed_zero3"):
        return None
    return 2 * (supernodes - 1) / supernodes * model
