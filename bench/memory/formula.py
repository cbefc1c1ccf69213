"""Peak bytes of a rank in a steady training step, in closed form.

Let a unit have P elements (padded to a multiple of F, the size of the shard group), and let c, r, m be the bytes of an
element in compute, in sums of gradients and at rest. What may be alive:

| what | bytes | from, until |
|---|---|---|
| shard, two AdamW states | 3 m P / F | always |
| sharded gradient | r P / F (and m P / F more where m is another dtype) | always |
| full parameters | c P | gather, reshard |
| full parameters gathered ahead | at most max(prefetch, largest unit); none for prefetch = 0 | prefetch, use |
| gradients of the full parameters | c P | backward of the unit, its reduction |
| operand of the reduce-scatter, where it is no gradient itself (c != r) | r P | reduction issued, done |
| what gloo's exchange receives | r P | reduction issued, done |
| full gradients kept by set_requires_gradient_sync(False) | r P | first backward, reduction |
| a sum that is added to the partial sum of earlier micro-batches | r P / F | reduction issued, done |
| partial sums beside an existing `.grad` | r P / F | their reduction, delivery |

Backward visits the units in reverse order, the root unit last. `in_flight` units that were submitted before may still
have their operands. The peak is the largest sum over the moments below; forward never has more than the moment in
which backward enters the same unit, but where all full parameters are kept the last forward has no gradients yet, so
backward is the larger there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Accumulation = Literal["none", "grad_exists", "all_reduce_last", "sync_last"]


@dataclass(frozen=True)
class Setting:
    """What decides how much memory a step takes.

    Attributes:
        shard_size: F, ranks of the shard group.
        compute: c, bytes of an element of the full parameters.
        reduce: r, bytes of an element of a sum of gradients.
        master: m, bytes of an element at rest.
        reshard: Whether full parameters are released between forward and backward (the root's are not).
        prefetch: Bytes of full parameters gathered ahead; None: the largest unit.
        accumulation: "none": one micro-batch, no `.grad` before it. "grad_exists": micro-batches that are all reduced
            into an existing `.grad`. "all_reduce_last": sums inside the supernode, then once between. "sync_last":
            full gradients are kept until the last micro-batch.
        bucket: Bytes of a bucket of sharded gradients; None: one bucket takes all units.
        window: Buckets beside `.grad` that may wait for the slow link.
        in_flight: Units whose reduce-scatter may be running while the next one computes.
        exchanges: Whether the reduce-scatter receives into a buffer of its own (gloo).
    """

    shard_size: int = 2
    compute: int = 4
    reduce: int = 4
    master: int = 4
    reshard: bool = True
    prefetch: int | None = None
    accumulation: Accumulation = "none"
    bucket: int | None = None
    window: int = 2
    in_flight: int = 1
    exchanges: bool = True


@dataclass(frozen=True)
class Moment:
    """A moment of the step and what is alive in it, in bytes.

    Attributes:
        name: What happens.
        parts: What is alive, by kind.
    """

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def peak(root: int, units: Sequence[int], setting: Setting, *, activations: int = 0) -> Moment:
    """The moment with the most bytes.

    Args:
        root: Elements of the root unit, padded.
        units: Elements of the other units, padded, in order of forward; at least one.
        setting: See `Setting`.
        activations: Bytes that autograd has saved at the end of forward.

    Returns:
        The moment. Its parts count a byte once.

    Raises:
        ValueError: `units` is empty.
    """
    if not units:
        raise ValueError("the formula needs at least one unit beside the root")
    return max(moments(root, units, setting, activations=activations), key=lambda moment: moment.total)


def moments(root: int, units: Sequence[int], setting: Setting, *, activations: int = 0) -> list[Moment]:
    """All moments that can be the peak; see `peak` for the arguments."""
    found = []
    for index in reversed(range(len(units))):
        base = _resting(root, units, setting) | {
            "root": root * setting.compute,
            "activations": activations,
            "full gradients kept": _kept(root, units, index, setting),
            "partial sums": _partial(root, units, setting),
        }
        running = units[index + 1 : index + 1 + setting.in_flight]
        computing = {
            "full": units[index] * setting.compute,
            "full, others": _others(units, index, setting),
            "gradients": units[index] * setting.compute,
            "in flight": sum(_in_flight(unit, setting) for unit in running),
        }
        found.append(Moment(f"backward of unit {index}", base | computing))
        reducing = {
            "full": 0 if setting.reshard else units[index] * setting.compute,
            "full, others": _others(units, index, setting),
            "gradients": units[index] * setting.compute,
            # The unit before has been waited for; this one's operands are made.
            "in flight": _in_flight(units[index], setting) - _aliased(units[index], setting),
        }
        found.append(Moment(f"reduction of unit {index}", base | reducing))
    return found


def _resting(root: int, units: Sequence[int], setting: Setting) -> dict[str, int]:
    held = (root + sum(units)) // setting.shard_size
    stores = 0 if setting.master == setting.reduce else held * setting.master
    flat = 0 if stores else held * setting.reduce
    return {"shards and states": 3 * held * setting.master, "sharded gradients": flat + stores}


def _others(units: Sequence[int], index: int, setting: Setting) -> int:
    """Full parameters of the units that backward has yet to reach: all where they are kept, else those ahead."""
    if not setting.reshard:
        return sum(units[:index]) * setting.compute
    ahead, budget = 0, max(units) * setting.compute if setting.prefetch is None else setting.prefetch
    if budget == 0:
        return 0
    for unit in reversed(units[:index]):
        size = unit * setting.compute
        if ahead and ahead + size > budget:
            break
        ahead += size
    return ahead


def _in_flight(unit: int, setting: Setting) -> int:
    """What a running reduce-scatter holds: its operand, be it a gradient or a copy, what it receives, its sum."""
    operands = unit * setting.reduce * (2 if setting.exchanges else 1)
    scratch = unit * setting.reduce // setting.shard_size if setting.accumulation == "all_reduce_last" else 0
    return operands + scratch


def _aliased(unit: int, setting: Setting) -> int:
    """The part of `_in_flight` that is the gradient itself, or a kept sum, and counted as such."""
    same = setting.compute == setting.reduce or setting.accumulation == "sync_last"
    return unit * setting.reduce if same else 0


def _kept(root: int, units: Sequence[int], index: int, setting: Setting) -> int:
    """Full gradients of earlier micro-batches of this unit and of those that backward has yet to reach."""
    return (root + sum(units[: index + 1])) * setting.reduce if setting.accumulation == "sync_last" else 0


def _partial(root: int, units: Sequence[int], setting: Setting) -> int:
    """Sums beside `.grad`: at most `window` buckets wait for the slow link, and one more is being filled."""
    if setting.accumulation != "grad_exists":
        return 0
    held = (root + sum(units)) * setting.reduce // setting.shard_size
    return held if setting.bucket is None else min(held, (setting.window + 1) * setting.bucket)
