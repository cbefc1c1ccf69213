"""Jobs that save and resume: the layouts, a cache of what has been saved, and what a resumed job must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron import training
from tests.megatron.cases import tiny_job
from tests.megatron.training import Run
from tests.support import run_ranks

HALF, END = 4, 8
TIME_LIMIT_S = 240.0
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
    """Runs jobs, and each job that saves once: it saves at `HALF` and goes on to `END`, which is the reference."""

    def __init__(self, corpus: list[str], directory: Path) -> None:
        self._corpus = corpus
        self._directory = directory
        self._saved: dict[tuple[str, Layout], tuple[Path, list[Run]]] = {}

    def saved(self, shared: str, layout: Layout) -> list[Run]:
        """The uninterrupted run of a job that saved at `HALF`."""
        return self._once(shared, layout)[1]

    def resumed(
        self, shared: str, saver: Layout, loader: Layout, *, rank: Callable[..., Run] = training.train
    ) -> list[Run]:
        """A job that resumes from what `saver` saved, in the layout of `loader`; `rank` is what its ranks run."""
        place, _ = self._once(shared, saver)
        return self._run(shared, loader, ["--load", str(place), "--ckpt-step", str(HALF)], rank)

    def _once(self, shared: str, layout: Layout) -> tuple[Path, list[Run]]:
        if (shared, layout) not in self._saved:
            place = self._directory / str(len(self._saved))
            runs = self._run(shared, layout, ["--save", str(place), "--save-interval", str(HALF)], training.train)
            self._saved[shared, layout] = place, runs
        return self._saved[shared, layout]

    def _run(self, shared: str, layout: Layout, more: list[str], rank: Callable[..., Run]) -> list[Run]:
        argv = [*tiny_job("--train-iters", str(END)), *self._corpus, *shared.split(), *layout.arguments.split(), *more]
        return run_ranks(layout.ranks, rank, flavour="megatron", timeout=TIME_LIMIT_S, argv=argv)


def assert_continues(reference: list[Run], resumed: list[Run], start: int, tolerance: float) -> None:
    """From `start` on, the resumed run has the losses and norms of the reference (on the last stage of each)."""
    expected, found = reference[-1], resumed[-1]
    assert sorted(found.losses) == list(range(start + 1, END + 1))
    for iteration in found.losses:
        assert found.losses[iteration] == pytest.approx(expected.losses[iteration], rel=tolerance)
        assert found.norms[iteration] == pytest.approx(expected.norms[iteration], rel=10 * tolerance)
