"""Losses, gradient norms, learning rates and weights of our engine are those of stock ZeRO-3 on the same ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hp_plugin.deepspeed import versions
from tests.deepspeed import training
from tests.deepspeed.training import Run
from tests.support import run_ranks

TOLERANCE = 2e-6
"""Relative, in fp32: sums are formed in another order."""

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
CLIPPED = {"gradient_clipping": 0.5}
ACCUMULATED = {"gradient_accumulation_steps": 3}


@dataclass(frozen=True)
class Job:
    """One job, run by both engines.

    Attributes:
        config: what is added to the configuration.
        ranks: number of ranks.
        supernode_size: of our block.
        build: how engine and model are made, see `training.initialize`.
        style: how our job calls backward; stock always calls `engine.backward`, which must give the same.
        full: only in the full suite.
    """

    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    supernode_size: int = 1
    build: dict[str, Any] = field(default_factory=dict)
    style: str = "engine"
    full: bool = True


JOBS = {
    "accumulation-clipped-warmup": Job({**ACCUMULATED, **CLIPPED, "scheduler": WARMUP}, style="no_sync", full=False),
    "plain": Job(),
    "one-supernode": Job(CLIPPED, supernode_size=2),
    "accumulation": Job(ACCUMULATED, supernode_size=2),
    "zero-init": Job(CLIPPED, build={"zero_init": True}),
    "client-optimizer": Job(build={"client": "object"}),
    "client-groups-zero-init": Job(CLIPPED, build={"client": "groups", "zero_init": True}),
    "callable-optimizer-and-scheduler": Job(build={"client": "callable", "scheduler": "callable"}),
    "direct-backward": Job(ACCUMULATED, style="direct"),
    "boundary-told-after-forward": Job(ACCUMULATED, style="told"),
    "coalesced": Job(ACCUMULATED, style="coalesced"),
    "tied": Job(build={"model": {"tied": True}}),
    "sgd": Job({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
    "adam-with-l2": Job(
        {
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False},
            }
        }
    ),
    "4-ranks-2-supernodes": Job({**ACCUMULATED, **CLIPPED, "scheduler": WARMUP}, ranks=4, supernode_size=2),
    "4-ranks-1-supernode": Job(CLIPPED, ranks=4, supernode_size=4),
    "4-ranks-4-supernodes": Job(ACCUMULATED, ranks=4, supernode_size=1, build={"zero_init": True}),
}


def both(job: Job, **more: Any) -> tuple[list[Run], list[Run]]:
    """Stock's runs and ours, by rank."""
    config = training.base_config(**job.config)
    config["hyperfsdp"] = {"supernode_size": job.supernode_size}
    common: dict[str, Any] = dict(flavour="deepspeed", timeout=240, **job.build, **more)
    stock = run_ranks(job.ranks, training.train, config=training.stock(config), **common)
    ours = run_ranks(job.ranks, training.train, config=config, style=job.style, **common)
    return stock, ours


def relative(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


@pytest.mark.parametrize(
    "job", [pytest.param(job, id=name, marks=[pytest.mark.full] * job.full) for name, job in JOBS.items()]
)
@pytest.mark.timeout(600)
def test_training_equals_stock_zero3(job: Job) -> None:
    stock, ours = both(job)
    assert {run.engine for run in stock} == {"DeepSpeedEngine"}
    assert {run.engine for run in ours} == {"HyperFSDPEngine"}
    for theirs, mine in zip(stock, ours):
        assert relative(mine.losses, theirs.losses) < TOLERANCE
        assert relative(mine.norms, theirs.norms) < TOLERANCE
        assert mine.rates == theirs.rates
        assert mine.weights.keys() == theirs.weights.keys()
        for name, expected in theirs.weights.items():
            found = mine.weights[name]
            assert found.shape == expected.shape
            assert float((found - expected).norm() / expected.norm()) < TOLERANCE, name


@pytest.mark.full
@pytest.mark.timeout(600)
def test_bf16_with_fp32_masters_follows_stock_zero3() -> None:
    stock, ours = both(Job({"bf16": {"enabled": True}, **CLIPPED}, build={"zero_init": True}))
    for theirs, mine in zip(stock, ours):
        assert relative(mine.losses, theirs.losses) < 1e-2
        assert relative(mine.norms, theirs.norms) < 2e-2
        assert all(weight.dtype.is_floating_point and weight.dtype.itemsize == 4 for weight in mine.weights.values())


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_autocast_in_bf16_follows_stock_zero3() -> None:
    stock, ours = both(Job({**AUTOCAST, **CLIPPED, **ACCUMULATED}))
    plain = run_ranks(2, training.train, config=training.base_config(**CLIPPED), flavour="deepspeed", timeout=240)
    for theirs, mine, fp32 in zip(stock, ours, plain):
        assert relative(mine.losses, theirs.losses) < 1e-2
        assert relative(mine.norms, theirs.norms) < 2e-2
        assert relative(mine.losses[:1], fp32.losses[:1]) > 1e-6  # autocast was on
        for name, weight in mine.weights.items():
            assert weight.dtype == torch.float32
            expected = theirs.weights[name]
            assert float((weight - expected).norm() / expected.norm()) < 2e-2, name


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    (versions.deepspeed_version() or "").startswith(("0.17", "0.18")), reason="the setting is new in DeepSpeed 0.19"
)
def test_the_caller_may_own_the_boundary() -> None:
    config = training.base_config(**ACCUMULATED, **CLIPPED, scheduler=WARMUP, managed_gradient_accumulation=False)
    options: dict[str, Any] = dict(flavour="deepspeed", timeout=240, style="unmanaged")
    stock = run_ranks(2, training.train, config=training.stock(config), **options)
    ours = run_ranks(2, training.train, config=config, **options)
    managed = run_ranks(
        2,
        training.train,
        config=training.base_config(**ACCUMULATED, **CLIPPED, scheduler=WARMUP),
        flavour="deepspeed",
        timeout=240,
    )
    for theirs, mine, same in zip(stock, ours, managed):
        for other in (theirs, same):
            assert relative(mine.losses, other.losses) < TOLERANCE
            assert relative(mine.norms, other.norms) < TOLERANCE
            assert mine.rates == other.rates
            for name, expected in other.weights.items():
                assert float((mine.weights[name] - expected).norm() / expected.norm()) < TOLERANCE, name
