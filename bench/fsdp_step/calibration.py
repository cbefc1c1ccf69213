"""How long the modelled layer must take for compute to be what a balance asks."""

from __future__ import annotations

from collections.abc import Sequence

_WAITS_PER_LAYER = 3  # a forward and a backward of twice its time


def corrected_layer(layer_s: float, *, floor_s: float, target_s: float, layers: int) -> float:
    """The layer time with which the floor, now `floor_s` per step, would take `target_s`; not below 0.

    What the floor does beside waiting (embedding, head, optimizer) does not depend on the layer time, so the whole
    difference goes into the layers.
    """
    return max(0.0, layer_s + (target_s - floor_s) / (_WAITS_PER_LAYER * layers))


def most_attempts(rounds: int) -> int:
    """Rounds that may be run in order to keep `rounds` of them."""
    return 2 * rounds + 4


def drift(excess: Sequence[float], *, rejected: Sequence[bool]) -> float | None:
    """How far the floor has moved from its target, if it has: not when one slow round stands alone.

    Args:
        excess: floor minus target, in seconds, of the rounds since the last calibration.
        rejected: which of them were rejected.

    Returns:
        The smaller of the last two, where both were rejected and lie on one side of the target; else None.
    """
    if len(excess) < 2 or not (rejected[-1] and rejected[-2]) or excess[-1] * excess[-2] < 0:
        return None
    return min(excess[-2:], key=abs)
