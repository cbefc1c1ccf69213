"""Memory of a whole supernode at the peak of a step: every variant in processes of its own, PSS of all its ranks."""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import paired
from bench.fsdp_step import peers
from bench.fsdp_step.model import make_batches, unit_sizes
from bench.fsdp_step.pace import Pace
from bench.fsdp_step.settings import OURS, OURS_ALIASED, OURS_C10D, Options, Settings, Size
from bench.fsdp_step.variant import Context
from bench.loopback import run_on_loopback
from bench.memory.pss import Sample, Sampler, peak_together, sample
from bench.report import Report, say

SIZE = Size(layers=16, dim=768, heads=12, vocabulary=1024, tokens=32)
"""115 million parameters, 459 MB, beside which the activations of 32 tokens are nothing."""
QUICK_SIZE = Size(layers=16, dim=512, heads=8, vocabulary=1024, tokens=32)
"""51 million parameters, 206 MB."""
_LAYER_S = 0.005
"""Modelled forward of a layer. It keeps what lives in it alive for as long as a sample takes."""
_INTERVAL_S = 0.01
_LIMIT_S = 300.0
OURS_SHM = "ours_shm"
HEADLINE = (1, 4)
"""Supernodes and ranks in each, of the keys that name no shape."""
GLIBC, RETURNING = "glibc", "returning"
ALLOCATORS: dict[str, dict[str, str]] = {
    GLIBC: {},
    # Also keeps the first from rising with what is freed.
    RETURNING: {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"},
}
"""How malloc is set up in the ranks. As it comes, glibc keeps much of what is freed: a program that frees and allocates
more occupies more. Set to return memory, what a process occupies is what it uses."""


@dataclass(frozen=True)
class Entry:
    """A variant: its name in the report, the kind that `bench.fsdp_step.peers` builds, its options."""

    name: str
    kind: str
    options: Options


@dataclass(frozen=True)
class Steps:
    """Steps before the measurement and in it."""

    warm_up: int
    measured: int


@dataclass(frozen=True)
class Life:
    """What one rank saw: PSS before the model existed, and in the measured steps."""

    baseline: Sample
    samples: list[Sample]
    transport: str


@dataclass(frozen=True)
class Peak:
    """Of a supernode, in bytes; of several supernodes, the one with most.

    Attributes:
        total: PSS of its ranks at the peak.
        shared: The part of it in shared memory.
        baseline: PSS of its ranks before the model existed: libraries, interpreters, process groups.
        transport: What moved bytes inside it; empty for a peer.
    """

    total: int
    shared: int
    baseline: int
    transport: str = ""


def entries(settings: Settings) -> list[Entry]:
    """What is compared: ours by transport, and FSDP2 as it comes and with the options that were fastest."""
    ours = settings.options_of(OURS, delay_ms=0.0)
    return [
        Entry(OURS_SHM, OURS, {**ours, "transport": "shm"}),
        Entry(OURS_ALIASED, OURS_ALIASED, ours),
        Entry(OURS_C10D, OURS_C10D, ours),
        Entry("fsdp2_tuned", "fsdp2_tuned", settings.options_of("fsdp2_tuned", delay_ms=0.0)),
        Entry("fsdp2", "fsdp2", {}),
    ]


def live(*, entry: Entry, shape: tuple[int, int], size: Size, steps: Steps, layer_s: float) -> Life:
    """Trains one variant. Every rank must call, in processes that have run nothing else."""
    importlib.import_module(peers.BUILDERS[entry.kind].partition(":")[0])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for axis in ("dp_replicate", "dp_shard"):  # connections have buffers
        dist.all_reduce(torch.zeros(1), group=mesh[axis].get_group())
    dist.barrier()
    baseline = sample()
    dist.barrier()
    context = Context(mesh=mesh, size=size, pace=Pace(layer_s=layer_s), seed=1, learning_rate=1e-4, weight_decay=0.1)
    variant = peers.build(entry.kind, context, entry.options)
    (batch,) = make_batches(size, rank=dist.get_rank(), seed=1, count=1)
    for _ in range(steps.warm_up):
        variant.step(batch)
    dist.barrier()
    with Sampler(_INTERVAL_S) as sampler:
        for _ in range(steps.measured):
            variant.step(batch)
    return Life(baseline, sampler.samples, str(variant.facts().get("transport", "")))


def peak_of(lives: Sequence[Life], shape: tuple[int, int]) -> Peak:
    """The supernode with the largest peak, of ranks that are numbered supernode by supernode."""
    supernodes, ranks = shape
    found = []
    for index in range(supernodes):
        own = lives[index * ranks : (index + 1) * ranks]
        total, shared = peak_together([life.samples for life in own])
        found.append(Peak(total, shared, sum(life.baseline.total for life in own), own[0].transport))
    return max(found, key=lambda peak: peak.total)


def measure_supernodes(
    report: Report,
    settings: Settings,
    *,
    size: Size,
    shapes: Sequence[tuple[int, int]],
    allocators: Sequence[str],
    rounds: int,
    steps: Steps,
) -> None:
    """Runs every variant `rounds` times under every condition, and puts rows and ratios into `report`."""
    compared = entries(settings)
    for shape, allocator in itertools.product(shapes, allocators):
        measured = [
            _measure_round(paired.order(compared, index), shape, allocator, size, steps) for index in range(rounds)
        ]
        fill(report, shape, allocator, [entry.name for entry in compared], measured)
    report.environment["supernode_model"] = {**size.model_dump(), "parameters": sum(unit_sizes(size))}
    report.environment["supernode_options"] = {entry.name: entry.options for entry in compared}
    report.notes += _NOTES


def _measure_round(
    ordered: Sequence[Entry], shape: tuple[int, int], allocator: str, size: Size, steps: Steps
) -> dict[str, Peak]:
    peaks = {}
    for entry in ordered:
        lives = run_on_loopback(
            live,
            nprocs=shape[0] * shape[1],
            timeout_s=_LIMIT_S,
            environment=ALLOCATORS[allocator],
            entry=entry,
            shape=shape,
            size=size,
            steps=steps,
            layer_s=_LAYER_S,
        )
        peaks[entry.name] = found = peak_of(lives, shape)
        say(f"memory: {_shape(shape)}, {allocator}, {entry.name}: {found.total / 1e6:.0f} MB a supernode")
    return peaks


def fill(
    report: Report,
    shape: tuple[int, int],
    allocator: str,
    names: Sequence[str],
    rounds: Sequence[dict[str, Peak]],
) -> None:
    """Puts rows and ratios of one condition into `report`."""
    for name in names:
        peaks = [one[name] for one in rounds]
        total, baseline = (
            statistics.median(values) for values in ([p.total for p in peaks], [p.baseline for p in peaks])
        )
        report.rows.append(
            {
                "case": f"supernode {_shape(shape)}",
                "allocator": allocator,
                "variant": name,
                "transport": peaks[0].transport,
                "pss_mb": total / 1e6,
                "baseline_mb": baseline / 1e6,
                "above_baseline_mb": (total - baseline) / 1e6,
                "shared_mb": statistics.median(p.shared for p in peaks) / 1e6,
                "rounds": len(peaks),
            }
        )
    suffix = ("" if shape == HEADLINE else f"_{_shape(shape)}") + ("" if allocator == GLIBC else f"_{allocator}")
    totals = [{name: float(peak.total) for name, peak in one.items()} for one in rounds]
    above = [{name: float(peak.total - peak.baseline) for name, peak in one.items()} for one in rounds]
    for stem, mine in (("supernode_pss", OURS_SHM), ("supernode_pss_aliased", OURS_ALIASED)):
        for key, sizes, peer in (
            ("vs_fsdp2", totals, "fsdp2_tuned"),
            ("vs_fsdp2_default", totals, "fsdp2"),
            ("vs_c10d", totals, OURS_C10D),
            ("above_baseline_vs_fsdp2", above, "fsdp2_tuned"),
        ):
            report.add_ratio(f"{stem}_{key}{suffix}", paired.ratios(sizes, mine, peer))
    report.rounds += [
        {"shape": _shape(shape), "allocator": allocator, **{name: vars(peak) for name, peak in one.items()}}
        for one in rounds
    ]


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


_NOTES = (
    (
        "pss_mb is the largest sum of PSS over the ranks of a supernode at one moment of steady steps, whole "
        "processes; baseline_mb the same before the model existed. PSS counts a shared page once. Each variant ran in "
        "processes of its own; every rank took samples of itself every 10 ms."
    ),
    (
        "supernode_pss_vs_fsdp2 is against FSDP2 with the options that the recorded sweep of fsdp-step found fastest "
        "(full parameters stay between forward and backward); supernode_pss_vs_fsdp2_default against FSDP2 as it comes."
    ),
    (
        "glibc is malloc as it comes, which keeps much of what is freed; returning is malloc set to give it back, so "
        "that pss_mb is what is in use. Keys that name neither are of glibc."
    ),
)
