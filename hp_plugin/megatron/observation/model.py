"""What HyperFSDP would take and send for a model, in closed form; see `docs/fsdp.md` for where each term comes from.

Pure arithmetic on sizes. Bytes on links are those of ring collectives (`hp_plugin.core.topology.traffic`), of which a
rank sends (n - 1)/n of the full tensor for a gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MASTER_BYTES = 4
"""Of an element at rest, and of each of Adam's two moments."""


@dataclass(frozen=True)
class Part:
    """Units that share a mesh: the dense ones of a rank, or those of its experts.

    Attributes:
        units: Elements of each unit but the root, on this rank of tensor and pipeline parallelism.
        root: Elements of the root unit, which stays gathered from forward to backward; 0 for experts.
        shard_ranks: Global ranks of the shard group, in ring order.
        replica_ranks: Global ranks that hold the same shard, in ring order.
    """

    units: tuple[int, ...]
    root: int
    shard_ranks: tuple[int, ...]
    replica_ranks: tuple[int, ...]

    @property
    def elements(self) -> int:
        """All parameters."""
        return self.root + sum(self.units)


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of full parameters in compute, and of gradients on their way."""

    compute: int
    reduce: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        weights: At rest.
        gradients: Kept until the optimizer's step.
        states: Of the optimizer, fp32 weights beside those at rest included.
        passing: Full parameters and gradients of layers that compute, at the most.
    """

    weights: int
    gradients: int
    states: int
    passing: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.states + self.passing


@dataclass(frozen=True)
class Bytes:
    """What a rank sends per step, mean over the ring of its group, by tier."""

    intra: float = 0.0
    inter: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.intra + other.intra, self.inter + other.inter)


@dataclass(frozen=True)
class Operands:
    """Operands of a step's collectives, in bytes of the full tensor: what a measured link is multiplied with."""

    gathered: int
    scattered: int
    reduced: int


def memory(parts: Sequence[Part], precision: Precision) -> Memory:
    """What a rank would hold with HyperFSDP, activations apart, with one layer gathered ahead."""
    at_rest = sum(-(-part.elements // len(part.shard_ranks)) for part in parts)
    sharded = [part for part in parts if len(part.shard_ranks) > 1 or precision.compute != MASTER_BYTES]
    root = sum(part.root for part in sharded)
    largest = max((unit for part in sharded for unit in part.units), default=0)
    operand = largest * precision.reduce if precision.reduce != precision.compute else 0
    passing = (root + 2 * largest) * precision.compute + largest * precision.compute + operand
    return Memory(
        weights=at_rest * MASTER_BYTES,
        gradients=at_rest * MASTER_BYTES,
        states=2 * at_rest * MASTER_BYTES,
        passing=passing,
    )


def operands(part: Part, precision: Precision, *, micro_batches: int, reshard: bool) -> Operands:
    """The collectives of one step over the ranks of `part`."""
    passes = 2 if reshard else 1
    gathered = (part.root + passes * sum(part.units)) * precision.compute * micro_batches
    shard = -(-part.elements // len(part.shard_ranks))
    return Operands(
        gathered=gathered if len(part.shard_ranks) > 1 else 0,
        scattered=part.elements * precision.reduce * micro_batches if len(part.shard_ranks) > 1 else 0,
        reduced=shard * precision.reduce if len(part.replica_ranks) > 1 else 0,
    )


def traffic(part: Part, used: Operands, crosses: Callable[[int, int], bool]) -> Bytes:
    """What the collectives of one step send, by tier.

    Args:
        part: The ranks.
        used: Their operands.
        crosses: Whether two global ranks are in different supernodes.
    """
    inside = ring(part.shard_ranks, used.gathered + used.scattered, crosses)
    return inside + ring(part.replica_ranks, 2 * used.reduced, crosses)


def ring(ranks: Sequence[int], operand: float, crosses: Callable[[int, int], bool]) -> Bytes:
    """A gather or reduce-scatter of `operand` bytes over a ring: what one rank sends, mean over the ranks."""
    count = len(ranks)
    if count < 2:
        return Bytes()
    each = operand * (count - 1) / count
    crossing = sum(crosses(rank, ranks[(place + 1) % count]) for place, rank in enumerate(ranks)) / count
    return Bytes(intra=each * (1 - crossing), inter=each * crossing)


def predicted(step: float, stock_wire: float, our_wire: float, *, stock_overlaps: bool) -> tuple[float, float]:
    """Between which two times a step would take, in seconds.

    Args:
        step: Measured with stock.
        stock_wire: What stock's collectives take by the measured link.
        our_wire: What ours would take by it.
        stock_overlaps: Whether stock hides its collectives behind backward, so that they may be no part of `step`.

    Returns:
        If all of ours hides behind computation, and if none does.
    """
    compute = max(step - stock_wire, 0.0)
    best = max(compute, our_wire)
    worst = (step if stock_overlaps else compute) + our_wire
    return best, worst
