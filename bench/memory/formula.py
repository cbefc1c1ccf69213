"""Peak bytes of a rank in a steady training step, in closed form.

Let a unit have P elements (padded to a multiple of F, the size of the shard group), and let c, r, m be the bytes of an
element in compute, in sums of gradients and at rest. What may be alive:

| what | bytes | from, until |
|---|---|---|
| shard, two AdamW states | 3 m P / F | always |
| sharded gradients, by bucket | r P / F | first reduction of the bucket, next forward without `.grad` |
| `.grad` of its own, where r and m are other dtypes | m P / F | always |
| full parameters | c P | gather, reshard |
| full parameters gathered ahead | max(prefetch, one unit); 0 for prefetch = 0 | prefetch and reduction before, use |
| gradients of the full parameters | c P | backward of the unit, its reduction |
| operand of the reduce-scatter, where it is no gradient itself (c != r) | r P | reduction issued, done |
| what gloo's exchange receives | r P (F - 2) / F | reduction issued, done |
| a sum that is added to the partial sum of earlier micro-batches | r P / F | reduction issued, done |
| full gradients kept by set_requires_gradient_sync(False) | r P | first backward, reduction |
| buckets of sums beside an existing `.grad` | window x bucket, at most all | first reduction of the bucket, delivery |

Backward visits the units in reverse order, the root unit last; `in_flight` units that were submitted before the one
that computes may still have their operands. The peak is the largest sum over two moments of each unit's backward: when
all its gradients exist, and when its reduction has been issued. Forward has less than backward of the same unit.
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
        bucket: Bytes of a bucket of sharded gradients, filled with units in the order of backward; None: all units.
        window: Buckets beside `.grad`, the one being filled included.
        in_flight: Units whose reduce-scatter may be running while the next one computes.
        exchanges: Whether the reduce-scatter receives into buffers of its own (gloo).
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
        parts: What is alive, by kind; a byte counts once.
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
        shared = {
            "shards and states": 3 * setting.master * (root + sum(units)) // setting.shard_size,
            "root": root * setting.compute,
            "activations": activations,
            "full gradients kept": _kept(root, units, index, setting),
            "sums beside .grad": _beside(root, units, setting),
        }
        others = _others(units, index, setting)
        running = sum(_in_flight(unit, setting) for unit in _running(units, index, setting))
        # A gather is prepared when the reduction before it is done: only one of the two is there.
        is_ahead = others >= running
        computing = {
            "full, others": others if is_ahead or not setting.reshard else 0,
            "in flight": running if not is_ahead or not setting.reshard else 0,
            "full": units[index] * setting.compute,
            "gradients": units[index] * setting.compute,
            "sharded gradients": _sharded(root, units, index + 1, setting),
        }
        # The unit before has been waited for by now, this one's full parameters are gone, and a gradient that is cast
        # goes when it has been.
        reducing = {
            "full, others": others,
            "full": 0 if setting.reshard else units[index] * setting.compute,
            "gradients": 0,
            "in flight": _in_flight(units[index], setting) - _kept_operand(units[index], setting),
            "sharded gradients": _sharded(root, units, index, setting),
        }
        found.append(Moment(f"backward of unit {index}", shared | computing))
        found.append(Moment(f"reduction of unit {index}", shared | reducing))
    return found


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
    operand = unit * setting.reduce
    received = operand * (setting.shard_size - 2) // setting.shard_size if setting.exchanges else 0
    scratch = operand // setting.shard_size if setting.accumulation == "all_reduce_last" else 0
    return operand + received + scratch


def _kept_operand(unit: int, setting: Setting) -> int:
    """The part of `_in_flight` that is a kept sum and counted as such."""
    return unit * setting.reduce if setting.accumulation == "sync_last" else 0


def _running(units: Sequence[int], index: int, setting: Setting) -> Sequence[int]:
    """Units whose reduction runs while unit `index` computes.

    Without prefetch there is none: unit `index` has waited for its gather, which runs behind that reduction.
    """
    if setting.reshard and setting.prefetch == 0:
        return ()
    return units[index + 1 : index + 1 + setting.in_flight]


def _sharded(root: int, units: Sequence[int], first: int, setting: Setting) -> int:
    """Sharded gradients when the reduction of unit `first`, and of those behind it, has begun."""
    held = (root + sum(units)) // setting.shard_size
    if setting.reduce != setting.master:
        return held * setting.master
    if setting.accumulation in ("grad_exists", "all_reduce_last") or setting.bucket is None:
        # Earlier micro-batches have left all of them, or the first reduction makes the one bucket.
        begun = first < len(units) or setting.accumulation in ("grad_exists", "all_reduce_last")
        return held * setting.reduce if begun else 0
    return sum(bucket for start, bucket in _buckets(root, units, setting) if start >= first)


def _buckets(root: int, units: Sequence[int], setting: Setting) -> list[tuple[int, int]]:
    """(index of the first unit that backward puts into it, bytes) of each bucket, the root's as index -1."""
    assert setting.bucket is not None
    found: list[tuple[int, int]] = []
    for index, unit in [*reversed(list(enumerate(units))), (-1, root)]:
        size = unit // setting.shard_size * setting.reduce
        if found and found[-1][1] + size <= setting.bucket:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((index, size))
    return found


def _kept(root: int, units: Sequence[int], index: int, setting: Setting) -> int:
    """Full gradients of earlier micro-batches of this unit and of those that backward has yet to reach."""
    return (root + sum(units[: index + 1])) * setting.reduce if setting.accumulation == "sync_last" else 0


def _beside(root: int, units: Sequence[int], setting: Setting) -> int:
    """Sums beside `.grad`: at most `window` buckets exist."""
    if setting.accumulation != "grad_exists":
        return 0
    held = (root + sum(units)) * setting.reduce // setting.shard_size
    return held if setting.bucket is None else min(held, setting.window * setting.bucket)
