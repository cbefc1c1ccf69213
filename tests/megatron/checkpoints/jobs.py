"""Jobs that save and resume: the layouts, a cache of what has been saved, and what a resumed job must show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.megatron import training
from tests.megatron.cases import tiny_job
from tests.megatron.training import Run
from tests.megatron.whole_weights import merged
from tests.support import run_ranks

HALF, END = 4, 8
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"


@dataclass(frozen=True)
class Layout:
    """How a job runs: number of ranks, and arguments beyond those that all jobs of a case share."""

    ranks: int
    arguments: str = ""


def ours(ranks: int, supernode_size: int, arguments: str = "") -> Layout:
    return Layout(ranks, f"--use-hyperfsdp --hyperfsdp-supernode-size {supernode_size} {arguments}")


def stock(ranks: int, arguments: str = "") -> Layout:
    return Layout(ranks, arguments)


class SavedJobs:
    """Runs jobs, each of them once. A job that saves does so at `HALF` and goes on to `END`, which is the reference."""

    common = ""
    """Arguments of all jobs beyond those of `tiny_job`."""

    time_limit_s = 240.0

    def __init__(self, corpus: list[str], directory: Path, *, rank: Callable[..., Run] = training.train) -> None:
        self._corpus = corpus
        self._directory = directory
        self._rank = rank
        self._saved: dict[tuple[str, Layout], tuple[Path, list[Run]]] = {}
        self._resumed: dict[tuple[Any, ...], list[Run]] = {}

    def saved(self, shared: str, layout: Layout) -> list[Run]:
        """The uninterrupted run of a job that saved at `HALF` and at `END`."""
        return self._once(shared, layout)[1]

    def place(self, shared: str, layout: Layout) -> Path:
        """Where that job saved."""
        return self._once(shared, layout)[0]

    def resumed(
        self,
        shared: str,
        saver: Layout,
        loader: Layout,
        *,
        step: int = HALF,
        rank: Callable[..., Run] | None = None,
    ) -> list[Run]:
        """A job that resumes from what `saver` saved at `step`, in the layout of `loader`; run once.

        Args:
            shared: Arguments that both jobs have.
            saver: The layout that saved.
            loader: The layout that resumes.
            step: `HALF`, or `END` for a job that has nothing left to do.
            rank: What the ranks of the job that resumes run, if it is not what all run.
        """
        key = (shared, saver, loader, step, rank)
        if key not in self._resumed:
            self._resumed[key] = self.run(shared, loader, load=(self.place(shared, saver), step), rank=rank)
        return self._resumed[key]

    def run(
        self,
        shared: str,
        layout: Layout,
        *,
        save: Path | None = None,
        every: int = HALF,
        load: tuple[Path, int] | None = None,
        rank: Callable[..., Run] | None = None,
    ) -> list[Run]:
        """A job to `END` that is not remembered.

        Args:
            shared: Arguments.
            layout: More of them, and the number of ranks.
            save: Where to save.
            every: After how many iterations.
            load: From where to resume, and from which iteration.
            rank: As in `resumed`.
        """
        argv = [*tiny_job("--train-iters", str(END)), *self._corpus, *self.common.split(), *shared.split()]
        argv += layout.arguments.split()
        if save is not None:
            argv += ["--save", str(save), "--save-interval", str(every)]
        if load is not None:
            argv += ["--load", str(load[0]), "--ckpt-step", str(load[1])]
        return self._start(layout, rank or self._rank, argv)

    def _start(self, layout: Layout, rank: Callable[..., Run], argv: list[str]) -> list[Run]:
        return run_ranks(layout.ranks, rank, flavour="megatron", timeout=self.time_limit_s, argv=argv)

    def _once(self, shared: str, layout: Layout) -> tuple[Path, list[Run]]:
        if (shared, layout) not in self._saved:
            place = self._directory / str(len(self._saved))
            self._saved[shared, layout] = place, self.run(shared, layout, save=place)
        return self._saved[shared, layout]


@dataclass(frozen=True)
class Differences:
    """How far a resumed run is from its reference.

    Attributes:
        loss: Largest relative difference of a loss.
        norm: Largest relative difference of a gradient norm before clipping.
        largest: Largest absolute difference of a weight at the end.
        mean: Largest mean of the absolute differences in one weight tensor.
        iterations: Those of the resumed run.
    """

    loss: float
    norm: float
    largest: float
    mean: float
    iterations: list[int]


def differences(reference: list[Run], resumed: list[Run]) -> Differences:
    """Compare the runs of all ranks, whatever their layouts: losses, norms, and weights by name in the whole model."""
    expected, found = reference[-1], resumed[-1]  # the last pipeline stage has losses
    assert found.losses and found.losses.keys() == found.norms.keys()
    losses = {i: _relative(found.losses[i], expected.losses[i]) for i in found.losses}
    norms = {i: _relative(found.norms[i], expected.norms[i]) for i in found.norms}
    gaps = _gaps(merged([run.whole for run in reference]), merged([run.whole for run in resumed]))
    return Differences(
        loss=max(losses.values()),
        norm=max(norms.values()),
        largest=max(largest for largest, _ in gaps.values()),
        mean=max(mean for _, mean in gaps.values()),
        iterations=sorted(found.losses),
    )


def _relative(found: float, expected: float) -> float:
    assert math.isfinite(found)
    return abs(found - expected) / abs(expected)


def _gaps(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By name: the largest and the mean difference. Where one run has bf16 weights, both are rounded to bf16."""
    assert found.keys() == expected.keys() and expected
    gaps = {}
    for name, tensor in expected.items():
        other = found[name]
        if tensor.shape != other.shape:  # the vocabulary is padded by layout; no token is padding
            rows = min(len(tensor), len(other))
            assert "embedding" in name or "output_layer" in name
            assert tensor.shape[1:] == other.shape[1:]
            tensor, other = tensor[:rows], other[:rows]
        dtype = min(tensor.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        gap = (tensor.to(dtype).float() - other.to(dtype).float()).abs()
        gaps[name] = float(gap.max()), float(gap.mean())
    return gaps


@dataclass(frozen=True)
class Limits:
    """The largest `Differences` that a resumed run may have; None where a kind is not compared."""

    loss: float
    norm: float
    largest: float | None
    mean: float | None


EXACT = Limits(0.0, 0.0, 0.0, 0.0)

FP32 = Limits(loss=5e-7, norm=2e-6, largest=1e-6, mean=2e-8)
"""Between layouts. What is left is the order of sums: losses differ by the last bit of fp32 (1.0e-7 measured), norms by
up to 9.7e-7, weights by one rounding of a value near 1 (1.2e-7; 2.9e-7 once, in one element). Stock Megatron alone,
on 4 ranks and then on 2, also differs from itself; `test_matrix` has such pairs."""

FP32_GRAM = Limits(loss=5e-7, norm=2e-6, largest=4e-6, mean=4e-7)
"""Where one of two Muon jobs orthogonalizes by Gram matrices, which are summed up over shards, and the other does not:
the polynomial is the same, its rounding is another (weights 9.5e-7, 1.0e-7 in the mean measured)."""

BF16 = Limits(loss=5e-5, norm=6e-4, largest=8e-3, mean=2e-4)
"""Masters that differ in the last bit of fp32 round a few weights to another bf16 value, and one unit near 1 is 7.8e-3
(losses 1.7e-5, norms 2.0e-4, weights 3.9e-3 and 6.1e-5 in the mean measured)."""


def limits_of(shared: str) -> Limits:
    """Those of a job with these arguments, between two layouts."""
    return BF16 if "--bf16" in shared else FP32


def assert_continues(reference: list[Run], resumed: list[Run], start: int = HALF, limits: Limits = FP32) -> None:
    """From `start` on, the resumed run has the losses and norms of the reference, and its weights at the end."""
    assert sorted(resumed[-1].losses) == list(range(start + 1, END + 1))
    found = differences(reference, resumed)
    print(f"differences: loss {found.loss:.1e}, norm {found.norm:.1e}, weights {found.largest:.1e} ({found.mean:.1e})")
    for name in ("loss", "norm", "largest", "mean"):
        limit = getattr(limits, name)
        if limit is not None:
            assert getattr(found, name) <= limit, f"{name}: {found}"


def assert_same_weights(reference: list[Run], loaded: list[Run]) -> None:
    """All weights are equal, bit for bit: fp32 masters among each other, or else what they are rounded to."""
    gaps = _gaps(merged([run.whole for run in reference]), merged([run.whole for run in loaded]))
    changed = [name for name, (largest, _) in gaps.items() if largest]
    assert not changed, f"{changed} are not what was saved"
