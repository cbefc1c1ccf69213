"""A checkpoint saved on one mesh loads on another, in ours and in torch FSDP2, and training goes on undisturbed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from tests.fsdp import transfer
from tests.fsdp.comparison import BFLOAT16, FLOAT32, Record, assert_same_training
from tests.fsdp.conftest import TRANSPORTS
from tests.fsdp.runs import Mesh, single_record
from tests.fsdp.variants import Variant, fsdp2_runs_on, single_process
from tests.support import run_ranks

HYPER = Variant(micro_batches=3, mode="all_reduce_last", steps=transfer.STEPS)
FSDP2 = Variant(backend="fsdp2", micro_batches=3, steps=transfer.STEPS)
FSDP2_1D = Variant(backend="fsdp2", micro_batches=3, one_dim=True, steps=transfer.STEPS)
MIXED = Variant(micro_batches=3, mixed=True, steps=transfer.STEPS)
MLP = Variant(model="mlp", steps=transfer.STEPS)
TIED = Variant(model="tied", steps=transfer.STEPS)
KEEP = Variant(reshard=False, steps=transfer.STEPS)


@dataclass(frozen=True)
class Transfer:
    """Save `saver` on `source` with `writer`, load into `loader` on `target` with `reader`."""

    source: Mesh
    saver: Variant
    target: Mesh
    loader: Variant
    writer: str = "dcp"
    reader: str = "dcp"

    def runs(self) -> bool:
        """Whether this torch can train both ends."""
        ends = ((self.saver, self.source), (self.loader, self.target))
        return all(variant.backend != "fsdp2" or fsdp2_runs_on(mesh) for variant, mesh in ends)

    def __str__(self) -> str:
        ends = [(self.saver, self.source, self.writer), (self.loader, self.target, self.reader)]
        return "-to-".join(f"{v.backend}-{v.model}-{'bf16-' * v.mixed}{m[0]}x{m[1]}-{io}" for v, m, io in ends)


TRANSFERS = [
    Transfer((2, 2), HYPER, (1, 2), HYPER),
    Transfer((1, 4), HYPER, (2, 1), HYPER),
    Transfer((1, 2), HYPER, (2, 2), HYPER),
    Transfer((2, 1), HYPER, (1, 4), HYPER),
    Transfer((2, 2), HYPER, (1, 1), HYPER, "ours", "ours"),
    Transfer((1, 4), HYPER, (2, 2), HYPER, "ours", "ours"),
    Transfer((2, 2), HYPER, (1, 2), HYPER, "ours", "ours"),
    Transfer((2, 2), KEEP, (1, 4), KEEP, "ours", "ours"),
    Transfer((1, 4), MLP, (2, 1), MLP),
    Transfer((1, 4), MLP, (2, 2), MLP, "ours", "ours"),
    Transfer((2, 2), TIED, (1, 2), TIED),
    Transfer((2, 2), MIXED, (1, 4), MIXED),
    Transfer((2, 2), HYPER, (1, 2), FSDP2_1D),
    Transfer((1, 4), HYPER, (2, 2), FSDP2),
    Transfer((2, 2), FSDP2, (1, 4), HYPER),
    Transfer((1, 4), FSDP2_1D, (2, 1), HYPER),
]
TRANSFERS = [each for each in TRANSFERS if each.runs()]


class Halves:
    """Both halves of every transfer: one job per source mesh, then one per target mesh."""

    def __init__(self, directory: Path, transport: str) -> None:
        self._directory = directory
        self._transport = transport

    @functools.cache  # noqa: B019 (lives as long as the module's tests)
    def saved(self, mesh: Mesh) -> dict[Transfer, list[transfer.Part]]:
        transfers = [each for each in TRANSFERS if each.source == mesh]
        jobs = [(each.saver, each.writer, str(self._directory / str(each))) for each in transfers]
        return self._run(transfer.train_and_save, mesh, transfers, jobs)

    @functools.cache  # noqa: B019
    def loaded(self, mesh: Mesh) -> dict[Transfer, list[transfer.Part]]:
        transfers = [each for each in TRANSFERS if each.target == mesh]
        for source in {each.source for each in transfers}:
            self.saved(source)
        jobs = [(each.loader, each.reader, str(self._directory / str(each))) for each in transfers]
        return self._run(transfer.load_and_train, mesh, transfers, jobs)

    def _run(
        self, fn: object, mesh: Mesh, transfers: list[Transfer], jobs: list[object]
    ) -> dict[Transfer, list[transfer.Part]]:
        env = {TRANSPORT_VARIABLE: self._transport}
        by_rank = run_ranks(mesh[0] * mesh[1], fn, replicate=mesh[0], shard=mesh[1], jobs=jobs, env=env, timeout=180.0)
        return {each: [parts[index] for parts in by_rank] for index, each in enumerate(transfers)}


# What is saved is at rest, where transports do not differ.
@pytest.fixture(scope="module", params=[TRANSPORTS[0], pytest.param(TRANSPORTS[1], marks=pytest.mark.full)])
def halves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves(tmp_path_factory.mktemp("checkpoints"), request.param)


@pytest.mark.parametrize("each", TRANSFERS, ids=str)
def test_state_arrives_bit_by_bit(halves: Halves, each: Transfer) -> None:
    saved = halves.saved(each.source)[each][0].state
    for part in halves.loaded(each.target)[each]:
        loaded = part.state
        assert loaded.weights.keys() == saved.weights.keys()
        assert loaded.optimizer.keys() == saved.optimizer.keys()
        for name, weight in saved.weights.items():
            assert torch.equal(loaded.weights[name], weight), name
            assert loaded.optimizer[name].keys() == saved.optimizer[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
            for key, value in saved.optimizer[name].items():
                assert torch.equal(loaded.optimizer[name][key], value), (name, key)


@pytest.mark.parametrize("each", TRANSFERS, ids=str)
def test_training_goes_on_as_if_uninterrupted(halves: Halves, each: Transfer) -> None:
    reference = single_record(single_process(each.saver, each.source))
    tolerance = BFLOAT16 if each.saver.mixed else FLOAT32
    for part in halves.saved(each.source)[each]:
        assert_same_training(part.record, steps(reference, 0, transfer.SAVED_AFTER), tolerance)
    for part in halves.loaded(each.target)[each]:
        assert_same_training(part.record, steps(reference, transfer.SAVED_AFTER, transfer.STEPS), tolerance)


def steps(record: Record, start: int, stop: int) -> Record:
    return Record(*(values[start:stop] for values in vars(record).values()))
