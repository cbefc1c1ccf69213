"""Faults of DeepSpeed's own sharding that its users have reported, each as a test of this adapter.

References are to deepspeedai/DeepSpeed where no other repository is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hp_plugin.deepspeed import versions
from hp_plugin.deepspeed.migration import migrate
from tests.deepspeed import public_bugs
from tests.deepspeed.helpers import MUON
from tests.deepspeed.public_bugs import BugRun
from tests.deepspeed.test_engine import TOLERANCE, relative
from tests.deepspeed.test_scaler import needs_fp16
from tests.deepspeed.training import Run, base_config, stock
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(600)


def run(ranks: int, function: Any = public_bugs.train, **arguments: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="deepspeed", timeout=200, **arguments)


def zero3(**options: Any) -> dict[str, Any]:
    """A configuration as its user had it, without our block."""
    config = stock(base_config())
    config["zero_optimization"].update(options)
    return config


def migrated(*, supernode_size: int | None = None, **options: Any) -> dict[str, Any]:
    """The same, rewritten by `hp-plugin check --fix`."""
    config = migrate(zero3(**options)).config
    if supernode_size is not None:
        # Ranks of two supernodes share no memory, as those of this host would.
        config["hyperfsdp"].update(supernode_size=supernode_size, transport="c10d")
    return config


def assert_equal(found: Run, expected: Run, *, tolerance: float = TOLERANCE) -> None:
    assert relative(found.losses, expected.losses) < tolerance
    assert relative(found.norms, expected.norms) < tolerance
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).norm() / weight.norm()) < tolerance, name


@pytest.mark.full
def test_a_job_of_mics_has_a_way_on() -> None:
    """Issue 8489: DeepSpeed 0.19.8 removed MiCS; a configuration with `mics_shard_size` no longer starts, and nothing
    takes its place.
    """
    said = run(2, public_bugs.refused_keys, configs={"stock": zero3(mics_shard_size=2)})[0]
    if versions.deepspeed_version() == "0.19.8":  # earlier releases have MiCS
        assert "MiCS ZeRO-3 sharding has been removed" in said["stock"]
    config = migrated(mics_shard_size=2, mics_hierarchical_params_gather=True)
    assert not any(key.startswith("mics") for key in config["zero_optimization"])
    ours = run(4, config=config, steps=4)
    theirs = run(4, config=zero3(), steps=4)
    assert {(each.engine, each.mesh) for each in ours} == {("HyperFSDPEngine", (2, 2))}
    assert {each.engine for each in theirs} == {"DeepSpeedEngine"}
    for mine, expected in zip(ours, theirs):
        assert_equal(mine, expected)


@needs_fp16
@pytest.mark.full
def test_weights_gathered_over_two_tiers_do_not_overflow() -> None:
    """Issue 5080: with MiCS across two nodes and hierarchical gathering, waiting raised "IllegalWork"; where it did
    not, the first 10 to 20 steps in fp16 overflowed, while plain ZeRO-3 trained without an overflow.
    """
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 100}}
    block = {"supernode_size": 2, "shard_size": "world", "reshard_after_forward": 2, "transport": "c10d"}
    ours = run(4, config=base_config(hyperfsdp=block, **fp16), steps=12)
    theirs = run(4, config={**zero3(), **fp16}, steps=12)
    for mine, expected in zip(ours, theirs):
        assert (mine.skipped, mine.scale) == (expected.skipped, expected.scale) == (0, 2.0**12)
        assert relative(mine.losses, expected.losses) < 5e-3


def test_a_parameter_that_a_release_adds_does_not_shift_the_others() -> None:
    """Issue 4731: a release added `offload_ratio` to the constructor of ZeRO's optimizer; MiCS, a subclass that passed
    its arguments on by position, handed a float over as `mpu` and did not start.
    """
    (facts,) = run(1, public_bugs.with_a_new_parameter)
    assert facts == {"offload_ratio": 0.0, "class": "HyperFSDPEngine", "equal": True}


@needs_fp16
@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [({}, TOLERANCE), ({"fp16": {"enabled": True, "initial_scale_power": 10}}, 2e-3)],
    ids=["fp32", "fp16"],
)
def test_a_second_sharding_for_backward_changes_no_loss(precision: dict[str, Any], tolerance: float) -> None:
    """Issues 7164 and 4851: with hpZ (`zero_hpz_partition_size`) the loss was abnormally large, in fp16 among others,
    or began one to two points too high and stayed above that of the job without.
    """
    config = {**migrated(supernode_size=2, zero_hpz_partition_size=2), **precision}
    assert config["hyperfsdp"]["shard_size"] == "world" and config["hyperfsdp"]["reshard_after_forward"] == 2
    ours = run(4, config=config, steps=6)
    theirs = run(4, config={**zero3(), **precision}, steps=6)
    assert all(each.mesh == (1, 4) for each in ours)
    for mine, expected in zip(ours, theirs):
        assert relative(mine.losses, expected.losses) < tolerance
        assert relative(mine.norms, expected.norms) < 2 * tolerance


@pytest.mark.full
def test_the_first_step_after_loading_has_the_loss_of_a_job_that_went_on(tmp_path: Path) -> None:
    """Issue 7606: with hpZ the first loss, and the first one after loading a checkpoint, was too high, since backward
    used its second copy of the weights before it was filled.
    """
    config = migrated(supernode_size=2, zero_hpz_partition_size=2)
    options: dict[str, Any] = dict(config=config, directory=str(tmp_path))
    (whole,) = run(1, config=base_config(), steps=5)
    run(4, steps=2, save=True, **options)
    for mine in run(4, first=2, steps=3, load=True, **options):
        assert relative(mine.losses, whole.losses[2:]) < TOLERANCE
        assert relative(mine.norms, whole.norms[2:]) < TOLERANCE


@pytest.mark.full
def test_ranks_that_are_out_of_step_do_not_hang_two_supernodes() -> None:
    """Issue 5030: with hpZ on two nodes of eight, recomputation and Trainer, training hung for ever."""
    config = migrated(supernode_size=2, zero_hpz_partition_size=2)
    uneven = run(4, config=config, steps=5, uneven=True)
    (alone,) = run(1, config=base_config(), steps=5, uneven=True)
    for each in uneven:
        assert_equal(each, alone)
        assert relative(each.evaluated, alone.evaluated) < TOLERANCE


def muon(**more: Any) -> dict[str, Any]:
    return base_config(optimizer={"type": "HyperMuon", "params": MUON}, **more)


@pytest.mark.full
def test_clipping_does_not_divide_updates_of_muon_by_their_own_norm() -> None:
    """Issue 8439, PR 7776: with the default `gradient_clipping` of 1.0 every update of DeepSpeed's Muon was divided by
    its own norm, which grows with the model, and `grad_norm` was the norm of the update.
    """
    params = {**MUON, "weight_decay": 0.0}
    optimizer = {"optimizer": {"type": "HyperMuon", "params": params}}
    free = run(2, config=base_config(**optimizer, gradient_clipping=0.0), steps=1)[0]
    clipped = run(2, config=base_config(**optimizer, gradient_clipping=0.05), steps=1)[0]
    adam = run(2, config=base_config(gradient_clipping=0.0), steps=1)[0]
    start = run(2, config=base_config(gradient_clipping=0.0), steps=0)[0].weights
    assert free.norms == clipped.norms and relative(free.norms, adam.norms) < TOLERANCE  # that of raw gradients
    assert free.norms[0] > 4 * 0.05  # so clipping bites
    name = "blocks.0.up.weight"
    moved, expected = clipped.weights[name] - start[name], free.weights[name] - start[name]
    assert float((moved - expected).norm() / expected.norm()) < 1e-2  # a direction has no length to clip


@pytest.mark.full
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_checkpoint_of_muon_goes_on_at_another_number_of_ranks(precision: dict[str, Any], tmp_path: Path) -> None:
    """Issue 8608: the conversion that changes the number of ranks knew Adam's state only, and failed with KeyError
    'exp_avg' for Muon's. Issue 7746: a resumed job in bf16 had its momentum in fp32 and gradients in bf16, and its
    first step died.
    """
    config = muon(**precision)
    options: dict[str, Any] = dict(config=config, directory=str(tmp_path))
    (whole, *_) = run(2, config=config, steps=5)
    run(2, steps=2, save=True, **options)
    assert whole.states["momentum_buffer"] == "torch.float32"
    for ranks in (2, 3):
        rest: list[BugRun] = run(ranks, first=2, steps=3, load=True, **options)
        for each in rest:
            assert each.states == whole.states
            tolerance = 1e-2 if precision else 2e-5
            assert relative(each.losses, whole.losses[2:]) < tolerance
            assert relative(each.norms, whole.norms[2:]) < tolerance


@pytest.mark.full
def test_no_sync_works_with_stage_3() -> None:
    """Issue 6793, huggingface/accelerate issue 3481: `no_sync`, with which Accelerate wraps all micro-batches but the
    last, is refused by ZeRO-2 and ZeRO-3.
    """
    assert "no_sync context manager is incompatible" in run(1, public_bugs.no_sync_is_refused, config=zero3())[0]
    options: dict[str, Any] = dict(micro_batches=3)
    ours = run(2, public_bugs.accumulate_with_accelerate, config=base_config(), always_sync=False, **options)
    theirs = run(2, public_bugs.accumulate_with_accelerate, config=zero3(), always_sync=True, **options)
    for mine, expected in zip(ours, theirs):
        assert mine.engine == "HyperFSDPEngine"
        assert_equal(mine, expected)


@pytest.mark.full
def test_a_job_resumes_on_more_ranks_than_saved(tmp_path: Path) -> None:
    """Issue 2898 (and 3810, 6441, 5405): "The checkpoint being loaded used a DP world size of 4 but the current world
    size is 6. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently
    supported."
    """
    config = base_config(gradient_clipping=0.5, hyperfsdp={"supernode_size": "auto"})
    options: dict[str, Any] = dict(config=config, directory=str(tmp_path))
    (whole, *_) = run(2, config=config, steps=5)
    run(2, steps=2, save=True, **options)
    for each in run(3, first=2, steps=3, load=True, **options):
        assert relative(each.losses, whole.losses[2:]) < TOLERANCE
        assert relative(each.norms, whole.norms[2:]) < TOLERANCE
        for name, weight in whole.weights.items():
            assert float((each.weights[name] - weight).norm() / weight.norm()) < TOLERANCE, name
