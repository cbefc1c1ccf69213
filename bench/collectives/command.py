"""`python -m bench collectives`: runs every size on groups of 4 and of 2 ranks, reports times against gloo's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bench import paired
from bench.collectives.variants import C10D, GLOO, SHM, SUM
from bench.collectives.worker import MEMCPY, Plan, Time, measure
from bench.errors import UnavailableError
from bench.loopback import run_on_loopback
from bench.report import Report, say
from hp_plugin.core.kernels import native_status

MIB = 1 << 20
ROUNDS, QUICK_ROUNDS = 12, 5
SIZES, QUICK_SIZES = "1,4,16,64", "1,16"
RANKS = "4,2"
_BYTES_A_BLOCK = 128 * MIB
"""Calls of a collective in a round are chosen so that they move about as much, within the two limits below."""
_LEAST_CALLS, _MOST_CALLS = 2, 20
_LIMIT_S = 900.0
OPERATIONS = ("all_gather", "reduce_scatter")

SizesOption = Annotated[str, typer.Option("--sizes", help="MiB of the whole operand, with commas; empty: the default.")]
RanksOption = Annotated[str, typer.Option("--ranks", help="Sizes of the groups, with commas.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Rounds; 0: the default.")]


def benchmark(
    *, quick: bool = False, sizes: SizesOption = "", ranks: RanksOption = RANKS, rounds: RoundsOption = 0
) -> Report:
    """All-gather and reduce-scatter inside a supernode: our shared memory, our c10d transport, and gloo.

    Args:
        quick: fewer sizes and rounds.
        sizes: MiB of the whole operand.
        ranks: sizes of the groups.
        rounds: rounds of every size.
    """
    _require_shared_memory()
    chosen = _numbers(sizes or (QUICK_SIZES if quick else SIZES), "--sizes", least=1)
    groups = _numbers(ranks, "--ranks", least=2)
    count = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    plans = tuple(Plan(mib * MIB, rounds=count, calls=calls_of(mib)) for mib in chosen)
    for nprocs in groups:
        if uneven := [mib for mib in chosen if mib * MIB % (4 * nprocs)]:
            raise UnavailableError(f"--ranks {nprocs}: {uneven[0]} MiB of fp32 do not divide evenly; use 2, 4 or 8")
    report = Report("collectives", environment=_conditions(plans, groups))
    for nprocs in groups:
        say(f"collectives: {nprocs} ranks, {count} rounds of {', '.join(map(str, chosen))} MiB")
        by_rank = run_on_loopback(measure, nprocs=nprocs, timeout_s=_LIMIT_S, plans=plans)
        fill(report, nprocs, plans, by_rank)
    report.notes = list(_NOTES)
    return report


def calls_of(mib: int) -> int:
    """Calls of a collective on `mib` MiB in one round."""
    return max(_LEAST_CALLS, min(_MOST_CALLS, _BYTES_A_BLOCK // (mib * MIB)))


def fill(report: Report, ranks: int, plans: Sequence[Plan], by_rank: Sequence[Sequence[Time]]) -> None:
    """Puts rows, ratios and rounds of a group of `ranks` into `report`; a call takes what its slowest rank takes."""
    slowest: dict[tuple[int, str, int, str], float] = {}
    for own in by_rank:
        for one in own:
            key = (one.nbytes, one.operation, one.round, one.variant)
            slowest[key] = max(one.seconds, slowest.get(key, 0.0))
    for plan in plans:
        memcpy = [slowest[plan.nbytes, "memcpy", index, MEMCPY] for index in range(plan.rounds)]
        report.environment.setdefault("memcpy_gb_per_s", {})[f"{plan.nbytes // MIB} MiB, {ranks} ranks at once"] = (
            plan.nbytes / statistics.median(memcpy) / 1e9
        )
        for operation in OPERATIONS:
            names = [name for n, o, r, name in slowest if (n, o, r) == (plan.nbytes, operation, 0)]
            rounds = [
                {name: slowest[plan.nbytes, operation, index, name] for name in names} for index in range(plan.rounds)
            ]
            floors = [floor_bytes(operation, plan.nbytes, ranks) / plan.nbytes * seconds for seconds in memcpy]
            report.rows += [_row(ranks, plan.nbytes, operation, name, rounds, floors) for name in names]
            report.rounds += [
                {"ranks": ranks, "mib": plan.nbytes // MIB, "operation": operation, "memcpy_s": copied, **times}
                for times, copied in zip(rounds, memcpy)
            ]
            _add_ratios(report, ranks, plan.nbytes, operation, rounds)


def floor_bytes(operation: str, nbytes: int, ranks: int) -> float:
    """Bytes that each rank must copy at least, a copied byte being one that is read and one that is written.

    An all-gather into memory that all can read writes the own shard. A reduce-scatter of private gradients copies what
    the peers need of them to where they can read it, then reads a slice of each rank's and writes their sum.

    Args:
        operation: "all_gather" or "reduce_scatter".
        nbytes: Size of the whole operand.
        ranks: Size of the group.
    """
    if operation == "all_gather":
        return nbytes / ranks
    return nbytes - nbytes / ranks + (nbytes + nbytes / ranks) / 2


def _row(
    ranks: int, nbytes: int, operation: str, name: str, rounds: list[dict[str, float]], floors: list[float]
) -> dict[str, Any]:
    seconds = statistics.median(times[name] for times in rounds)
    return {
        "ranks": ranks,
        "operation": operation,
        "mib": nbytes // MIB,
        "variant": name,
        "ms": seconds * 1e3,
        "gb_per_s": nbytes * (ranks - 1) / ranks / seconds / 1e9,
        "floor_ms": statistics.median(floors) * 1e3,
        "over_floor": statistics.median(times[name] / floor for times, floor in zip(rounds, floors)),
        "vs_gloo": statistics.median(paired.ratios(rounds, name, GLOO)),
    }


def _add_ratios(report: Report, ranks: int, nbytes: int, operation: str, rounds: Sequence[dict[str, float]]) -> None:
    """Keys that name no number of ranks are those of 4."""
    suffix = "" if ranks == 4 else f"_{ranks}_ranks"
    stem = f"{operation}_{nbytes // MIB}mb"
    report.add_ratio(f"{stem}_vs_gloo{suffix}", paired.ratios(rounds, SHM, GLOO))
    report.add_ratio(f"{stem}_vs_c10d{suffix}", paired.ratios(rounds, SHM, C10D))
    if operation == "reduce_scatter":
        report.add_ratio(f"{stem}_sum_vs_gloo{suffix}", paired.ratios(rounds, SUM, GLOO))


def _require_shared_memory() -> None:
    status = native_status()
    if status.library is None:
        raise UnavailableError(f"shared memory needs the native library: {status.reason}")


def _numbers(text: str, option: str, *, least: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and int(word) >= least for word in words):
        raise UnavailableError(f"{option} {text!r}: write whole numbers of at least {least} with commas")
    return [int(word) for word in words]


def _conditions(plans: Sequence[Plan], groups: Sequence[int]) -> dict[str, Any]:
    return {
        "ranks": list(groups),
        "rounds": plans[0].rounds,
        "calls_a_round": {f"{plan.nbytes // MIB} MiB": plan.calls for plan in plans},
        "dtype": "fp32",
        "threads_a_rank": 1,
    }


_NOTES = (
    (
        "A size is that of the whole operand in MiB; a call takes what its slowest rank takes. gb_per_s is of the "
        "bytes that a rank gets from others (size x (n-1)/n over the time), for both operations."
    ),
    (
        "ours_shm publishes a private shard, and copies what peers need of a private gradient to where they read it: "
        f"both are in its times. {SUM} is the same reduce-scatter without that copy: gradients lie in shared memory "
        "already."
    ),
    (
        "floor_ms is what copying as many bytes as must be moved takes, at the rate at which all ranks copy at once in "
        "the same round. Every result was compared with the exact one."
    ),
)
