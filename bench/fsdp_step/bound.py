"""The closed form of our schedule: one stream of compute, one first-in-first-out link, no other cost.

Forward runs without the link. In backward the gradients of a unit leave as soon as they exist and the link is free; the
optimizer waits for the last of them. For equal units this is F + max(B, b1 + W) plus the wire time of the last unit
where the link is idle before it: nothing that waits with its optimizer for exact gradients can be faster on this link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Inputs of the bound, in seconds; sequences are indexed by unit in the order of forward.

    Attributes:
        forward: compute time of each unit.
        backward: the same of its backward.
        wire: time of its gradients on the link.
        optimizer: time of the update.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    wire: Sequence[float]
    optimizer: float

    def step(self) -> float:
        """Seconds of the fastest step."""
        now = sum(self.forward)
        link = 0.0
        for backward, wire in zip(reversed(self.backward), reversed(self.wire)):
            now += backward
            link = max(link, now) + wire
        return max(link, now) + self.optimizer


def schedule_of(
    sizes: Sequence[int], *, layer_s: float, forward_s: float, backward_s: float, optimizer_s: float, wire_s: float
) -> Schedule:
    """The schedule of the benchmark's model: embedding, equal layers, head.

    Args:
        sizes: elements of each unit, in the order of forward; the first and the last are no layers.
        layer_s: modelled forward of a layer; 0 under real compute.
        forward_s: measured forward of the floor. What exceeds the layers is the head's.
        backward_s: measured backward of the floor. What exceeds the layers is spread over units by their size.
        optimizer_s: measured update of the floor.
        wire_s: measured wire time of all gradient shards, spread over units by their size.
    """
    layers, total = len(sizes) - 2, sum(sizes)
    shares = [size / total for size in sizes]
    if layer_s <= 0:  # real compute: all by size
        forward = [forward_s * share for share in shares]
        backward = [backward_s * share for share in shares]
    else:
        rest = max(0.0, forward_s - layers * layer_s)
        forward = [0.0, *[layer_s] * layers, rest]
        rest = max(0.0, backward_s - 2 * layers * layer_s)
        waits = [0.0, *[2 * layer_s] * layers, 0.0]
        backward = [wait + rest * share for wait, share in zip(waits, shares)]
    return Schedule(forward, backward, [wire_s * share for share in shares], optimizer_s)
