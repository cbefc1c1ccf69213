"""`torch_dist` checkpoints between HyperFSDP and stock Megatron, across layouts: real jobs, saved and resumed.

A resumed job must go on as if it had never stopped: same losses, gradient norms and weights as the run that saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron import training
from tests.megatron.cases import BF16_TOLERANCE, FP32_TOLERANCE, tiny_job
from tests.megatron.training import Run
from tests.support import run_ranks

HALF, END = 4, 8
TIME_LIMIT_S = 90.0


@dataclass(frozen=True)
class Layout:
    """How a job runs: number of ranks, and arguments beyond those that all jobs of a case share."""

    ranks: int
    arguments: str = ""


def ours(ranks: int, supernode_size: int, arguments: str = "") -> Layout:
    return Layout(ranks, f"--use-hyperfsdp --hyperfsdp-supernode-size {supernode_size} {arguments}")


def stock(ranks: int, arguments: str = "") -> Layout:
    return Layout(ranks, arguments)


TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"


class Jobs:
    """Runs the jobs of one test; all share a corpus, a directory and some arguments."""

    time_limit_s = TIME_LIMIT_S

    def __init__(
        self, corpus: list[str], directory: Path, shared: str, *, train: Callable[..., Run] = training.train
    ) -> None:
        self._shared = [*tiny_job("--train-iters", str(END)), *corpus, *shared.split()]
        self._directory = directory
        self._train = train

    def run(
        self, layout: Layout, *, save: str | None = None, every: int = HALF, load: tuple[str, int] | None = None
    ) -> list[Run]:
        argv = [*self._shared, *layout.arguments.split()]
        if save is not None:
            argv += ["--save", str(self._directory / save), "--save-interval", str(every)]
        if load is not None:
            argv += ["--load", str(self._directory / load[0]), "--ckpt-step", str(load[1])]
        return run_ranks(layout.ranks, self._train, flavour="megatron", timeout=self.time_limit_s, argv=argv)


def assert_continues(reference: list[Run], resumed: list[Run], start: int, tolerance: float) -> None:
    """From `start` on, the resumed run has the losses and norms of the reference (on the last stage of each)."""
    expected, found = reference[-1], resumed[-1]
    assert sorted(found.losses) == list(range(start + 1, END + 1))
    for iteration in found.losses:
        assert found.losses[iteration] == pytest.approx(expected.losses[iteration], rel=tolerance)
        assert found.norms[iteration] == pytest.approx(expected.norms[iteration], rel=10 * tolerance)


def assert_same_weights(reference: list[Run], loaded: list[Run], *, rounded: bool = False) -> None:
    """All bits are equal; with `rounded`, those of our fp32 masters after rounding to stock's bf16 weights."""
    import torch

    for expected, found in zip(reference[: len(loaded)], loaded, strict=True):
        assert expected.weights.keys() == found.weights.keys()
        for name, tensor in expected.weights.items():
            mine = found.weights[name].bfloat16().float() if rounded else found.weights[name]
            assert torch.equal(tensor, mine), f"{name} is not what was saved"


def test_a_job_resumes_on_fewer_ranks_and_in_stock_with_tensor_parallelism(corpus: list[str], tmp_path: Path) -> None:
    jobs = Jobs(corpus, tmp_path, "--swiglu")
    saved = jobs.run(ours(4, 2), save="ours")
    assert_continues(saved, jobs.run(ours(2, 2), load=("ours", HALF)), HALF, FP32_TOLERANCE)
    assert_continues(saved, jobs.run(stock(2, TP), load=("ours", HALF)), HALF, FP32_TOLERANCE)
    assert_same_weights(saved, jobs.run(ours(2, 1), load=("ours", END)))


@pytest.mark.full
def test_a_bf16_job_goes_from_stock_to_hyperfsdp_and_back(corpus: list[str], tmp_path: Path) -> None:
    jobs = Jobs(corpus, tmp_path, "--bf16")
    saved = jobs.run(stock(2), save="stock")
    assert_same_weights(saved, jobs.run(ours(2, 2), load=("stock", END)), rounded=True)
    moved = jobs.run(ours(4, 2), load=("stock", HALF), save="ours", every=HALF + 2)
    assert_continues(saved, moved, HALF, BF16_TOLERANCE)
    assert_same_weights(moved, jobs.run(ours(2, 2), load=("ours", END)))  # the fp32 masters, bit by bit
    assert_continues(moved, jobs.run(stock(2), load=("ours", HALF + 2)), HALF + 2, BF16_TOLERANCE)


FULL = [
    pytest.param("", ours(4, 4), [ours(4, 1), ours(2, 1), stock(4), stock(4, PP)], id="shard-groups-of-4"),
    pytest.param("", ours(4, 1), [ours(4, 4), ours(1, 1)], id="replicas-only"),
    pytest.param(
        "--swiglu --global-batch-size 12 --ffn-hidden-size 172 --untie-embeddings-and-output-weights",
        ours(3, 3),
        [ours(2, 1), stock(2, TP), ours(3, 3, "--ckpt-fully-parallel-load")],
        id="uneven-shards",
    ),
    pytest.param(
        "",
        ours(4, 2, INTERLEAVED),
        [ours(4, 2, PP), ours(4, 2, TP), stock(4, PP), stock(2)],
        id="pipeline-tied-embeddings",
    ),
    pytest.param(
        "--untie-embeddings-and-output-weights",
        ours(4, 2, PP),
        [ours(2, 2), stock(4, INTERLEAVED)],
        id="pipeline-untied",
    ),
    pytest.param(
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2",
        ours(4, 2, f"{TP} --sequence-parallel"),
        [ours(4, 2), stock(2)],
        id="sequence-parallel-gqa-swiglu",
    ),
    pytest.param("", stock(4), [ours(4, 2), ours(4, 2, TP), ours(4, 2, INTERLEAVED), ours(2, 2)], id="from-stock"),
    pytest.param("--swiglu", stock(4, TP), [ours(4, 2), ours(4, 2, TP)], id="from-stock-tp-swiglu"),
    pytest.param("--optimizer sgd --sgd-momentum 0.9", ours(4, 2), [ours(2, 2)], id="sgd"),
    pytest.param("", ours(4, 2, "--no-ckpt-fully-parallel-save"), [ours(2, 1), stock(2)], id="plain-save"),
    pytest.param(
        "--position-embedding-type learned_absolute",
        ours(4, 2),
        [ours(2, 2), stock(2, TP)],
        id="learned-positions",
    ),
    pytest.param(
        "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --swiglu",
        ours(4, 2),
        [ours(2, 2), ours(4, 1), stock(2)],
        id="experts",
    ),
    # Without a persistent worker Megatron saves synchronously, with a line that says so.
    pytest.param(
        "",
        ours(4, 2, "--async-save --async-strategy mcore --use-persistent-ckpt-worker"),
        [ours(2, 1), stock(2)],
        id="asynchronous-save",
    ),
    pytest.param(
        "--ckpt-assume-constant-structure", ours(4, 2), [ours(2, 1), stock(2)], id="structure-assumed-constant"
    ),
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shared", "saver", "loaders"), FULL)
def test_a_job_resumes_in_every_other_layout(
    shared: str, saver: Layout, loaders: list[Layout], corpus: list[str], tmp_path: Path
) -> None:
    jobs = Jobs(corpus, tmp_path, shared)
    saved = jobs.run(saver, save="half")
    for loader in loaders:
        assert_continues(saved, jobs.run(loader, load=("half", HALF)), HALF, FP32_TOLERANCE)


@pytest.mark.full
def test_a_vocabulary_with_more_padding_is_filled_up_as_by_stock(corpus: list[str], tmp_path: Path) -> None:
    """256 tokens are padded to 300 rows, and to 400 under tensor parallelism; the new rows change the loss."""
    jobs = Jobs(corpus, tmp_path, "--make-vocab-size-divisible-by 100")
    jobs.run(ours(2, 2), save="half")
    reference = jobs.run(stock(2, TP), load=("half", HALF))
    assert_continues(reference, jobs.run(ours(4, 2, TP), load=("half", HALF)), HALF, FP32_TOLERANCE)


@pytest.mark.full
def test_a_bf16_job_resumes_bit_by_bit_in_its_own_layout(corpus: list[str], tmp_path: Path) -> None:
    jobs = Jobs(corpus, tmp_path, "--bf16 --swiglu")
    saved = jobs.run(ours(4, 2), save="half")
    resumed = jobs.run(ours(4, 2), load=("half", HALF))
    assert_continues(saved, resumed, HALF, 0.0)
    assert_same_weights(saved, resumed)


@pytest.mark.full
def test_a_job_can_start_from_weights_without_optimizer_state(corpus: list[str], tmp_path: Path) -> None:
    jobs = Jobs(corpus, tmp_path, "--bf16")
    saved = jobs.run(stock(2, "--no-save-optim"), save="weights")
    started = jobs.run(ours(2, 2, "--finetune --no-load-optim --no-load-rng"), load=("weights", END))
    again = jobs.run(stock(2, "--finetune --no-load-optim --no-load-rng"), load=("weights", END))
    assert started[-1].losses[1] < saved[-1].losses[1] - 0.5, "the weights of the checkpoint were not used"
    assert started[-1].losses[1] == pytest.approx(again[-1].losses[1], rel=BF16_TOLERANCE)
    assert started[-1].losses[END] == pytest.approx(again[-1].losses[END], rel=10 * BF16_TOLERANCE)
