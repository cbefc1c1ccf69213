"""`--use-hypermuon` in real Megatron jobs: one process, every layout and stock's own Muon, whose checkpoints it reads.

Checkpoints between layouts and other optimizers are in `tests/megatron/checkpoints/test_matrix.py`.

All jobs of a model start from the same weights, those of a checkpoint: Megatron initialises a model otherwise under
tensor and pipeline parallelism. The iteration runs in fp32, so that only the order of sums is left to differ.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron import training
from tests.megatron.cases import BF16_NORM_TOLERANCE, BF16_TOLERANCE, FP32_TOLERANCE, tiny_job
from tests.megatron.checkpoints.jobs import (
    FP32,
    FP32_GRAM,
    INTERLEAVED,
    PP,
    TP,
    Layout,
    SavedJobs,
    assert_continues,
    ours,
    stock,
)
from tests.megatron.test_equivalence import assert_same_series
from tests.megatron.training import Run
from tests.support import run_ranks

TIME_LIMIT_S = 240.0
MUON = "--use-hypermuon --hypermuon-ns-dtype fp32"
MODERN = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights"
)
PLAIN = ""
EXPERTS = f"{MODERN} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
EP = "--expert-model-parallel-size 2"
STOCK_MUON = (
    "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-scale-mode spectral --muon-extra-scale-factor 0.2 "
    "--muon-coefficient-type simple --muon-fp32-matmul-prec high --muon-tp-mode"
)
AS_STOCK_MUON = (
    f"{MUON} --hypermuon-scale megatron:spectral --hypermuon-extra-scale 0.2 --hypermuon-coefficients megatron:simple "
    "--hypermuon-split-gate-up false"
)
needs_stock_muon = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None, reason="stock Megatron's Muon needs emerging-optimizers"
)


class Starts:
    """Runs jobs that start from the same weights, and each job once."""

    def __init__(self, corpus: list[str], directory: Path) -> None:
        self._corpus, self._directory = corpus, directory
        self._weights: dict[str, Path] = {}
        self._runs: dict[tuple[str, Layout], list[Run]] = {}

    def run(self, model: str, layout: Layout) -> list[Run]:
        if (model, layout) not in self._runs:
            load = ["--load", str(self._saved(model)), "--finetune", "--no-load-optim", "--no-load-rng"]
            self._runs[model, layout] = self._train(model, layout, *load)
        return self._runs[model, layout]

    def _saved(self, model: str) -> Path:
        if model not in self._weights:
            place = self._directory / str(len(self._weights))
            self._train(model, stock(1), "--train-iters", "1", "--save", str(place), "--save-interval", "1")
            self._weights[model] = place
        return self._weights[model]

    def _train(self, model: str, layout: Layout, *more: str) -> list[Run]:
        argv = [*tiny_job(), *self._corpus, *model.split(), *layout.arguments.split(), *more]
        return run_ranks(layout.ranks, training.train, flavour="megatron", timeout=TIME_LIMIT_S, argv=argv)


@pytest.fixture(scope="module")
def starts(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(corpus, tmp_path_factory.mktemp("starts"))


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    return SavedJobs(corpus, tmp_path_factory.mktemp("muon"))


def assert_same(expected: list[Run], found: list[Run], tolerance: float) -> None:
    assert_same_series("loss", expected[-1].losses, found[-1].losses, tolerance)
    assert_same_series("gradient norm", expected[-1].norms, found[-1].norms, tolerance)
    assert len(found[-1].losses) == 12


@dataclass(frozen=True)
class Case:
    """A layout that is compared with another run of the same model."""

    name: str
    model: str
    layout: Layout
    full: bool = True


def on_shards(ranks: int, supernode: int, more: str = "") -> Layout:
    return ours(ranks, supernode, f"{MUON} {more}")


def on_ddp(ranks: int, more: str = "") -> Layout:
    return stock(ranks, f"{MUON} {more}")


CASES = (
    Case("shards-tp2-sequence-parallel-modern", MODERN, on_shards(4, 2, f"{TP} --sequence-parallel"), full=False),
    Case("shards-2x2", PLAIN, on_shards(4, 2)),
    Case("shards-pp2", PLAIN, on_shards(4, 2, PP)),
    Case("shards-tp2-pp2-modern", MODERN, on_shards(4, 2, f"{TP} {PP}")),
    # By default Megatron pads the vocabulary to a multiple of 128 rows for each tensor-parallel rank, as one does not.
    Case(
        "shards-more-tp-ranks-than-query-groups",
        MODERN,
        on_shards(4, 4, "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 64"),
    ),
    Case("momentum-on-owners", PLAIN, on_shards(4, 2, "--hypermuon-momentum-placement owner")),
    Case("gathered", PLAIN, on_shards(4, 2, "--hypermuon-exchange gather")),
    Case("ddp4", PLAIN, on_ddp(4)),
    Case("ddp-tp2-sequence-parallel-modern", MODERN, on_ddp(4, f"{TP} --sequence-parallel")),
    Case("ddp-pp2", PLAIN, on_ddp(4, PP)),
    Case("shards-interleaved", PLAIN, on_shards(4, 2, INTERLEAVED)),
    Case("shards-experts-ep2", EXPERTS, on_shards(2, 2, EP)),
    Case("ddp-experts-ep2", EXPERTS, on_ddp(2, EP)),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.full] if case.full else []) for case in CASES]
)
def test_every_layout_trains_as_one_process_does(case: Case, starts: Starts) -> None:
    assert_same(starts.run(case.model, on_ddp(1)), starts.run(case.model, case.layout), FP32_TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["--bf16", "--fp16 --initial-loss-scale 65536"], ids=["bf16", "fp16"])
def test_16_bit_jobs_on_shards_train_as_with_the_masters_of_stock_ddp(dtype: str, starts: Starts) -> None:
    expected, found = (starts.run(PLAIN, layout) for layout in (on_ddp(2, dtype), on_shards(2, 1, dtype)))
    assert_same_series("loss", expected[-1].losses, found[-1].losses, BF16_TOLERANCE)
    assert_same_series("gradient norm", expected[-1].norms, found[-1].norms, BF16_NORM_TOLERANCE)


@pytest.mark.full
@needs_stock_muon
@pytest.mark.parametrize(
    ("model", "theirs", "layout"),
    [
        (PLAIN, stock(2, f"{STOCK_MUON} duplicated"), ours(2, 1, AS_STOCK_MUON)),
        (MODERN, stock(2, f"{STOCK_MUON} duplicated {TP}"), ours(2, 2, f"{AS_STOCK_MUON} {TP}")),
        (MODERN, stock(2, f"{STOCK_MUON} duplicated {TP}"), stock(2, f"{AS_STOCK_MUON} {TP}")),
        (
            MODERN,
            stock(2, f"{STOCK_MUON} blockwise {TP}"),
            ours(2, 2, f"{AS_STOCK_MUON} {TP} --hypermuon-tensor-parallel blockwise"),
        ),
    ],
    ids=["dp2", "tp2-shards", "tp2-ddp", "tp2-blockwise"],
)
def test_it_trains_as_megatrons_own_muon_does(model: str, theirs: Layout, layout: Layout, starts: Starts) -> None:
    assert_same(starts.run(model, theirs), starts.run(model, layout), 1e-5)


@pytest.mark.full
def test_momentum_that_one_replica_keeps_is_saved_for_all(jobs: SavedJobs) -> None:
    saver = on_shards(2, 1, "--hypermuon-momentum-placement owner")
    assert_continues(jobs.saved(MODERN, saver), jobs.resumed(MODERN, saver, on_ddp(1)))


@pytest.mark.full
@needs_stock_muon
@pytest.mark.parametrize("layout", [ours(2, 2, AS_STOCK_MUON), stock(1, AS_STOCK_MUON)], ids=["on-shards", "on-ddp"])
def test_it_goes_on_from_what_megatrons_own_muon_saved(layout: Layout, jobs: SavedJobs) -> None:
    saver = stock(2, f"{STOCK_MUON} duplicated {TP}")
    limits = FP32_GRAM if layout.ranks > 1 else FP32
    assert_continues(jobs.saved(PLAIN, saver), jobs.resumed(PLAIN, saver, layout), limits=limits)
