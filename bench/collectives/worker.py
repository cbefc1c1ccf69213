"""What a rank does: runs every variant in interleaved rounds, checks every result, and hands back its own times."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import paired
from bench.collectives.variants import C10D, GLOO, SHM, SUM, Gloo, OursC10d, OursShm, Variant

Operation = Literal["all_gather", "reduce_scatter", "memcpy"]
MEMCPY = "memcpy"
_PERIOD = 251
"""Values repeat with this prime, so that no slice looks like another one; sums of them are exact in fp32."""


@dataclass(frozen=True)
class Plan:
    """What is run for one size.

    Attributes:
        nbytes: Size of the whole operand in fp32, a multiple of 4 bytes for each rank.
        rounds: Rounds.
        calls: Calls of a collective in a round, between two barriers.
    """

    nbytes: int
    rounds: int
    calls: int


@dataclass(frozen=True)
class Time:
    """Seconds of one call on this rank, the mean of those of one round."""

    nbytes: int
    operation: Operation
    variant: str
    round: int
    seconds: float


def measure(*, plans: tuple[Plan, ...]) -> list[Time]:
    """Times of this rank. Every rank must call.

    Raises:
        RuntimeError: A collective gave something else than it must.
    """
    ranks = dist.get_world_size()
    groups = {name: dist.new_group(backend="gloo") for name in (GLOO, C10D)}
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    times: list[Time] = []
    for plan in plans:
        numel = plan.nbytes // 4
        variants: dict[str, Variant] = {
            SHM: OursShm(numel, mesh),
            C10D: OursC10d(numel, groups[C10D]),
            GLOO: Gloo(numel, groups[GLOO]),
        }
        times += _measure_size(plan, variants)
        del variants
        gc.collect()  # a unit and its root refer to one another, and hold the segment
    return times


def _measure_size(plan: Plan, variants: dict[str, Variant]) -> list[Time]:
    copier = _Copier(plan.nbytes // 4)
    times = []
    # The first round finds pages, connections and caches cold, and is not a measurement.
    for index in range(-1, plan.rounds):
        blocks: list[tuple[Operation, str]] = [("memcpy", MEMCPY)]
        blocks += [("all_gather", name) for name in variants]
        blocks += [("reduce_scatter", name) for name in [*variants, SUM]]
        for operation, name in paired.order(blocks, index):
            if operation == "memcpy":
                seconds = _timed(copier.copy, plan.calls)
            else:
                seconds = _block(variants[SHM if name == SUM else name], operation, name, index, plan.calls)
            if index >= 0:
                times.append(Time(plan.nbytes, operation, name, index, seconds))
    return times


def _block(variant: Variant, operation: Operation, name: str, index: int, calls: int) -> float:
    """Seconds of one call, of several on new values, checked."""
    rank, ranks, numel = dist.get_rank(), dist.get_world_size(), variant.gradient.numel()
    whole = _pattern(numel) + (index + 1)
    part = slice(rank * numel // ranks, (rank + 1) * numel // ranks)
    if operation == "all_gather":
        with torch.no_grad():
            variant.shard.copy_(whole[part])
        seconds = _timed(variant.all_gather, calls)
        _require_equal(variant.gathered, whole, f"all_gather of {name}")
        return seconds
    variant.gradient.copy_(whole)
    variant.gradient += rank
    expected = ranks * whole[part] + sum(range(ranks))
    if name == SUM:
        assert isinstance(variant, OursShm)
        variant.fill_slots()
    variant.reduced.zero_()
    call = variant.sum_of_slots if isinstance(variant, OursShm) and name == SUM else variant.reduce_scatter
    seconds = _timed(call, calls)
    _require_equal(variant.reduced, expected, f"reduce_scatter of {name}")
    return seconds


def _pattern(numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32).remainder_(_PERIOD).to(torch.float32)


def _require_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        at = int((found != expected).nonzero()[0])
        raise RuntimeError(
            f"{what} is wrong: element {at} of {expected.numel()} is {found[at].item()}, expected {expected[at].item()}"
        )


def _timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of a call, the mean of `calls` after one that finds its operands outside the caches."""
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


class _Copier:
    """Copies as many bytes as the whole operand has, on every rank at once: what memory can do here."""

    def __init__(self, numel: int) -> None:
        self._source, self._target = torch.ones(numel), torch.zeros(numel)

    def copy(self) -> None:
        """One copy."""
        self._target.copy_(self._source)
