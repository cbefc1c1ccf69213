"""What the testbed delivers through gloo: latency and bandwidth, inside and between supernodes."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.report import Report
from bench.testbed.options import DelayOption, LinkOption, RanksOption, SupernodesOption, parse_rate
from bench.testbed.testbed import Testbed

MIB = 1 << 20


def benchmark(
    *,
    quick: bool = False,
    supernodes: SupernodesOption = 2,
    ranks: RanksOption = 2,
    link: LinkOption = "1gbit",
    delay: DelayOption = 0.0,
) -> Report:
    """Measure the testbed itself: what its options promise and what gloo gets out of it.

    Args:
        quick: fewer repetitions.
        supernodes: number of supernodes.
        ranks: ranks in each.
        link: rate of each supernode's link.
        delay: one-way delay in ms.
    """
    options = {"supernodes": supernodes, "ranks_per_supernode": ranks, "delay_ms": delay}
    with Testbed(rate_mbit=parse_rate(link), **options) as testbed:  # type: ignore[arg-type]
        report = Report("link", environment={"testbed": testbed.describe()})
        report.rows = measure_link(testbed, quick=quick)
    report.notes.append(
        "Bus bandwidth of an 8 MiB all-reduce, 2 (n - 1) / n times its bytes over its time, the same as what each of "
        "the n ranks sends. `total` is the sum of the groups that run at once, so at most the rate of the link."
    )
    return report


def measure_link(testbed: Testbed, *, quick: bool = False) -> list[dict[str, Any]]:
    """Rows of what gloo gets out of `testbed`; see `measure`. Starts ranks of its own, which takes some seconds."""
    command = [sys.executable, "-m", "bench.testbed.link", "10" if quick else "40"]
    return list(testbed.run(command, timeout=300.0)[0].value)


def measure(*, repetitions: int = 40) -> list[dict[str, Any]]:
    """Measure with the ranks of the running job; every rank must call it, inside `worker.gloo()`.

    Returns:
        On every rank the same rows: `tier`, `group_size`, `groups_at_once`, `latency_ms` (4 B all-reduce), `mbit_per_s`
        (bus bandwidth of one group at 8 MiB, slowest rank), `total_mbit_per_s`. Medians over `repetitions` for
        latencies, over fewer for bandwidths.
    """
    import torch.distributed as dist

    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    inside = [list(range(first, first + local)) for first in range(0, world, local)]
    between = [list(range(first, world, local)) for first in range(local)]
    rows = []
    for tier, groups in (("inside", inside), ("between", between)):
        if len(groups[0]) > 1:
            counts = dict.fromkeys((1, len(groups)))
            rows += [_measure_groups(tier, groups[:count], repetitions) for count in counts]
    return rows


def _measure_groups(tier: str, groups: list[list[int]], repetitions: int) -> dict[str, Any]:
    """One row: all `groups` work at once, the other ranks wait at a barrier."""
    import torch
    import torch.distributed as dist

    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    size = len(groups[0])
    figures = []
    for operand, times in ((torch.zeros(1), repetitions), (torch.zeros(8 * MIB // 4), max(3, repetitions // 8))):
        slowest = torch.zeros(1, dtype=torch.float64)
        dist.barrier()
        if mine is not None:
            slowest[0] = _median_time(functools.partial(dist.all_reduce, operand, group=mine), times)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        figures.append(slowest.item())
    latency, seconds = figures
    rate = 2 * (size - 1) / size * 8 * MIB * 8 / seconds / 1e6
    return {
        "tier": tier,
        "group_size": size,
        "groups_at_once": len(groups),
        "latency_ms": latency * 1e3,
        "mbit_per_s": rate,
        "total_mbit_per_s": rate * len(groups),
    }


def _median_time(call: Callable[[], object], repetitions: int) -> float:
    call()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _main(repetitions: int) -> None:
    from bench.testbed import worker

    with worker.gloo():
        worker.publish(measure(repetitions=repetitions))


if __name__ == "__main__":
    _main(int(sys.argv[1]))
