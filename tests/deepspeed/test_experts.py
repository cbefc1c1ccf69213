"""Native mixtures under full sharding: what is computed does not depend on how experts are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed import moe_jobs
from tests.deepspeed.test_engine import TOLERANCE, relative
from tests.deepspeed.training import Run
from tests.support import run_ranks


def merged(runs: list[Run]) -> dict[str, torch.Tensor]:
    """The weights of all ranks, each of which holds some of the experts; those that several hold must be equal."""
    found: dict[str, torch.Tensor] = {}
    for run in runs:
        for name, weight in run.weights.items():
            assert torch.equal(found.setdefault(name, weight), weight), name
    return found


def run(ranks: int, **arguments: Any) -> list[Run]:
    return run_ranks(ranks, moe_jobs.train, flavour="deepspeed", timeout=200, **arguments)


def assert_equal(found: list[Run], alone: Run, *, tolerance: float = TOLERANCE) -> None:
    """What several ranks computed is what one process computed with the data of all of them."""
    ranks = len(found)
    for rank, each in enumerate(found):
        assert relative(each.losses, alone.losses[rank::ranks]) < tolerance
        assert relative(each.norms, alone.norms) < tolerance
    weights = merged(found)
    assert weights.keys() == alone.weights.keys()
    assert sum("deepspeed_experts" in name for name in weights) == 4 * moe_jobs.EXPERTS * 2
    for name, expected in alone.weights.items():
        assert float((weights[name] - expected).norm() / expected.norm()) < tolerance, name


@pytest.mark.timeout(600)
def test_experts_on_two_ranks_equal_one_process_and_stock_zero2() -> None:
    (alone,) = run(1, config=moe_jobs.config(), ep_sizes=[1, 1], ranks_of_data=2)
    assert_equal(run(2, config=moe_jobs.config(), ep_sizes=[2, 2]), alone)
    stock = run(2, config=moe_jobs.stock_config(2), ep_sizes=[2, 2])
    assert stock[0].engine == "DeepSpeedEngine"
    assert_equal(stock, alone)


@dataclass(frozen=True)
class Job:
    """One job with mixtures.

    Attributes:
        ep_sizes: of its layers.
        ranks: number of ranks.
        config: what is added to the configuration.
        model: options of the model.
        tolerance: relative.
    """

    ep_sizes: list[int]
    ranks: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE


def block(supernode_size: int, **more: Any) -> dict[str, Any]:
    return {"hyperfsdp": {"supernode_size": supernode_size, **more}}


JOBS = {
    "ep-1": Job([1, 1], ranks=2),
    "top-2-with-a-dense-branch": Job([2, 2], ranks=2, model={"k": 2, "use_residual": True}),
    "sgd-shows-a-wrong-divisor": Job([2, 2], config={"optimizer": moe_jobs.SGD, **block(2)}),
    "experts-stay-in-supernodes": Job([2, 2], config=block(4)),
    "an-expert-per-supernode": Job([4, 4], config=block(2)),
    "layers-differ": Job([2, 4], config=block(2)),
    "parts-kept-after-forward": Job([2, 1], config=block(4, reshard_after_forward=2)),
    "experts-are-units": Job([2, 2], config=block(4, units=["MixtureBlock", "Expert"])),
    "shard-size-in-numbers": Job([2, 2], config=block(4, shard_size=4)),
    "groups-of-deepspeed": Job([2, 2], ranks=2, model={"groups": True}),
    "muon-and-groups-of-deepspeed": Job(
        [2, 1], ranks=2, config={"optimizer": moe_jobs.MUON}, model={"groups": True}, tolerance=2e-5
    ),
    "muon": Job([2, 2], config={"optimizer": moe_jobs.MUON, **block(2)}, tolerance=2e-5),
}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOBS)
def test_experts_may_be_spread_in_any_way(name: str) -> None:
    job = JOBS[name]
    plain = {key: value for key, value in job.config.items() if key != "hyperfsdp"}
    (alone,) = run(1, config=moe_jobs.config(**plain), ep_sizes=[1, 1], ranks_of_data=job.ranks, **job.model)
    found = run(job.ranks, config=moe_jobs.config(**job.config), ep_sizes=job.ep_sizes, **job.model)
    assert_equal(found, alone, tolerance=job.tolerance)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_experts_train_in_bf16() -> None:
    bf16 = {"bf16": {"enabled": True}}
    found = run(2, config=moe_jobs.config(**bf16), ep_sizes=[2, 2])
    (alone,) = run(1, config=moe_jobs.config(**bf16), ep_sizes=[1, 1], ranks_of_data=2)
    assert_equal(found, alone, tolerance=1e-2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_checkpoints_hold_all_experts_and_load_at_any_ep_size(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(flavour="deepspeed", timeout=200, directory=str(tmp_path))
    saved = run_ranks(2, moe_jobs.save, ep_sizes=[2, 2], **options)
    weights = merged(saved)
    full = torch.load(tmp_path / "full.bin")
    assert full.keys() == weights.keys()
    assert all(torch.equal(full[name], weight) for name, weight in weights.items())
    for ranks, ep_sizes in [(1, [1, 1]), (2, [2, 2]), (2, [1, 2]), (4, [4, 2])]:
        loaded = run_ranks(ranks, moe_jobs.load, ep_sizes=ep_sizes, **options)
        found = merged(loaded)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        for each in loaded:
            assert relative(each.losses, saved[0].losses) < TOLERANCE
            assert relative(each.norms, saved[0].norms) < TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(400)
def test_written_experts_reach_the_ranks_that_hold_them() -> None:
    found = run_ranks(4, moe_jobs.write_experts, flavour="deepspeed", timeout=200)
    # Ranks 0 and 2 hold one half of the experts, ranks 1 and 3 the other; the second of each pair writes.
    assert [facts["value"] for facts in found] == [2.0, 3.0, 2.0, 3.0]
    assert {facts["shape"] for facts in found} == {(64, 32)}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_experts_that_cannot_be_sharded_are_refused_by_name() -> None:
    for said in run_ranks(2, moe_jobs.refusals, flavour="deepspeed", timeout=200):
        assert "1.weight is marked as an expert" in said["outside"] and "deepspeed.moe.layer.MoE" in said["outside"]
        assert "built under zero.Init" in said["zero.Init"]
        assert "2 model-parallel ranks" in said["mpu"] and "leave mpu out" in said["mpu"]
