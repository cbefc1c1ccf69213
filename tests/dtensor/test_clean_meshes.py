"""A model without a fault gives no finding: all meshes of up to eight ranks that it allows, over twenty seeds.

`validate` goes over (dp_replicate, dp_shard, tp) with a plain decoder; `--hyperfsdp-mode validation` over meshes with
pipeline stages with a job of Megatron, of which twenty steps are compared, each with weights and data of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import fully_shard
from hp_plugin.core.dtensor import plan_transformer, validate
from tests.dtensor.models import Decoder, Shape, make_batch, make_decoder
from tests.megatron.training import make_corpus
from tests.megatron.validation.validated import job_arguments, run_validated
from tests.support import init_gloo, run_ranks

SHAPE = Shape(width=16, heads=4, key_heads=4, layers=2, sequence=4, tied=True)
MOST_RANKS, SEEDS = 8, 20
AXES = ("dp_replicate", "dp_shard", "tp")
MESHES = [
    sizes
    for sizes in itertools.product(*(range(1, MOST_RANKS + 1),) * 3)
    if sizes[0] * sizes[1] * sizes[2] <= MOST_RANKS
    and SHAPE.heads % sizes[2] == 0
    and MOST_RANKS % (sizes[0] * sizes[1]) == 0  # the rows of a batch
]


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    assert isinstance(model, Decoder)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def findings(*, sizes: tuple[int, int, int]) -> list[str]:
    """The reports of the seeds that were found different."""
    init_gloo()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    wrong = []
    for seed in range(SEEDS):
        divided = seed % 2 == 0
        plan = plan_transformer(make_decoder(SHAPE), {"tp": sizes[2]}, sequence_parallel=divided, loss_parallel=divided)
        report = validate(
            lambda seed=seed: make_decoder(SHAPE, seed=seed),  # type: ignore[misc]
            plan,
            mesh,
            make_batch(SHAPE, rows=MOST_RANKS, seed=100 + seed),
            data_parallel=lambda model: _sharded(model, mesh["dp_replicate", "dp_shard"]),
        )
        if not report.is_equal:
            wrong.append(f"seed {seed}: {report}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_a_decoder_gives_no_finding(sizes: tuple[int, int, int]) -> None:
    ranks = sizes[0] * sizes[1] * sizes[2]
    assert run_ranks(ranks, findings, timeout=300.0, sizes=sizes) == [[]] * ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    return make_corpus(tmp_path_factory.mktemp("corpus"))


PIPELINES = [
    (pp, replicas, shards, tp)
    for pp, replicas, shards, tp in itertools.product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    if pp * replicas * shards * tp <= MOST_RANKS
]


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize("sizes", PIPELINES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_a_megatron_job_with_stages_gives_no_finding(sizes: tuple[int, int, int, int], corpus: list[str]) -> None:
    pp, replicas, shards, tp = sizes
    job = (
        f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp} "
        f"--hyperfsdp-supernode-size {shards * tp} "
        f"--seq-length 16 --max-position-embeddings 16 --train-iters {SEEDS} --global-batch-size 8 --micro-batch-size 1"
    )
    job += " --sequence-parallel" if tp > 1 else ""
    found = run_validated(pp * replicas * shards * tp, job_arguments(corpus, job), "--hyperfsdp-validation-steps", "20")
    for rank in found:
        assert len(rank["reports"]) == SEEDS
        assert all(report["equal"] for report in rank["reports"])
