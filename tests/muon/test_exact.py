"""exact=True gives the bits of torch.optim.Muon that is fed the same reduced gradients, whatever the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon import optimizer as optimizer_module
from hp_plugin.core.muon.plan import PlannedBlock
from tests.muon.layouts import cube, flat, grid, strided
from tests.muon.reference import HAS_TORCH_MUON, needs_torch_muon, reference_run, torch_run, values
from tests.muon.simulation import assert_same, train

# Square, wide and tall; dims that do not divide by 2 or 3, fewer rows than ranks, one row; several of one shape.
SHAPES = [(16, 16), (16, 16), (24, 40), (33, 17), (33, 17), (16, 50), (7, 13), (1, 16), (2, 3), (17, 2)]
STEPS = 3
CUBE = list(cube(3))
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def layouts(sizes: tuple[int, int, int]) -> list[Layout]:
    """Of every parameter another: both dims by either axis, one dim by both, strided."""
    found = []
    for index, shape in enumerate(SHAPES):
        shard, tensor = index % 2, (index // 2) % 2
        found.append(strided(shape, sizes) if index % 5 == 4 else grid(shape, sizes, shard=shard, tensor=tensor))
    return found


WEIGHTS = values(SHAPES, 1)
GRADIENTS = [values(SHAPES, 2 + step) for step in range(STEPS)]


def expected() -> list[Tensor]:
    if HAS_TORCH_MUON:
        return torch_run(WEIGHTS, GRADIENTS)
    return reference_run(WEIGHTS, GRADIENTS).weights


@needs_torch_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_the_reference_of_these_tests_is_torch(nesterov: bool, momentum: float) -> None:
    options = {"nesterov": nesterov, "momentum": momentum}
    mine = reference_run(WEIGHTS, GRADIENTS, **options).weights
    assert_same(mine, torch_run(WEIGHTS, GRADIENTS, options))


@pytest.mark.parametrize("sizes", CUBE, ids=lambda sizes: "R{}F{}T{}".format(*sizes))
def test_replicas_by_shards_by_tensor_parallel_ranks(sizes: tuple[int, int, int]) -> None:
    trained = train(layouts(sizes), WEIGHTS, GRADIENTS, exact=True, wave_bytes=2000, **OPTIONS)
    assert_same(trained.weights, expected())
    assert sum(each.newton_schulz_calls for each in trained.counters) == len(SHAPES)


@pytest.mark.full
@pytest.mark.parametrize("momentum_placement", ["replicated", "owner"])
@pytest.mark.parametrize("sizes", CUBE, ids=lambda sizes: "R{}F{}T{}".format(*sizes))
def test_the_same_with_gathers(sizes: tuple[int, int, int], momentum_placement: str) -> None:
    trained = train(
        layouts(sizes),
        WEIGHTS,
        GRADIENTS,
        exact=True,
        exchange="gather",
        momentum_placement=momentum_placement,
        wave_bytes=2000,
        **OPTIONS,
    )
    assert_same(trained.weights, expected())


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 2), (3, 2, 1)], ids=lambda sizes: "R{}F{}T{}".format(*sizes))
def test_momentum_on_the_owning_replica_alone(sizes: tuple[int, int, int]) -> None:
    trained = train(layouts(sizes), WEIGHTS, GRADIENTS, exact=True, momentum_placement="owner", **OPTIONS)
    assert_same(trained.weights, expected())
    assert_same(trained.momenta, reference_run(WEIGHTS, GRADIENTS).buffers)


@pytest.mark.parametrize("momentum_placement", ["replicated", "owner"])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (3, 2, 1), (2, 2, 2)], ids=lambda sizes: "R{}F{}T{}".format(*sizes))
def test_large_domains_bring_updates_back_in_two_stages(sizes: tuple[int, int, int], momentum_placement: str) -> None:
    options = {"momentum_placement": momentum_placement, "exchange": "a2a", "wave_bytes": 2000, **OPTIONS}
    direct = train(layouts(sizes), WEIGHTS, GRADIENTS, exact=True, **options)
    with mock.patch("hp_plugin.core.muon.plan.MAX_A2A_PEERS", 3):
        staged = train(layouts(sizes), WEIGHTS, GRADIENTS, exact=True, **options)
    assert_same(staged.weights, expected())
    # Not a byte more, and no collective of more ranks than a replica or the replicas have.
    assert sum(c.received_bytes for c in staged.counters) == sum(c.received_bytes for c in direct.counters)
    assert staged.counters[0].collectives == 1.5 * direct.counters[0].collectives


def test_large_groups_gather() -> None:
    with mock.patch("hp_plugin.core.muon.plan.MAX_A2A_PEERS", 2):
        for sizes in ((1, 3, 1), (3, 1, 1)):
            trained = train(layouts(sizes), WEIGHTS, GRADIENTS, exact=True, **OPTIONS)
            assert {wave.mode for wave in trained.plans[0].waves if wave.comes_back} == {"gather"}
            assert_same(trained.weights, expected())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_options(nesterov: bool, momentum: float) -> None:
    options = {"nesterov": nesterov, "momentum": momentum}
    trained = train(layouts((2, 2, 1)), WEIGHTS, GRADIENTS, exact=True, **options)
    assert_same(trained.weights, reference_run(WEIGHTS, GRADIENTS, **options).weights)


def test_bfloat16_weights_with_momentum_of_their_dtype() -> None:
    """Not bit by bit: torch adds bfloat16 numbers with another rounding at the ends of a tensor, wherever they are."""
    weights = [each.bfloat16() for each in WEIGHTS]
    gradients = [[each.bfloat16() for each in step] for step in GRADIENTS]
    trained = train(layouts((1, 2, 2)), weights, gradients, exact=True, momentum_dtype=torch.bfloat16, **OPTIONS)
    want = torch_run(weights, gradients) if HAS_TORCH_MUON else reference_run(weights, gradients).weights
    for mine, theirs in zip(trained.weights, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=STEPS * 2**-8, atol=1e-4)


@needs_torch_muon
def test_scales_of_torch() -> None:
    for name in ("original", "match_rms_adamw"):
        trained = train(layouts((1, 3, 1)), WEIGHTS, GRADIENTS, exact=True, scale=f"torch:{name}", **OPTIONS)
        assert_same(trained.weights, torch_run(WEIGHTS, GRADIENTS, {"adjust_lr_fn": name}))


# ---- invariances -----------------------------------------------------------------------------------------------------


def test_the_order_of_parameters_changes_nothing() -> None:
    order = [3, 9, 0, 7, 5, 1, 8, 2, 6, 4]
    where = layouts((2, 2, 2))
    trained = train(
        [where[i] for i in order],
        [WEIGHTS[i] for i in order],
        [[step[i] for i in order] for step in GRADIENTS],
        exact=True,
        **OPTIONS,
    )
    assert_same(trained.weights, [expected()[i] for i in order])


@pytest.mark.parametrize("power", [-20, 7])
def test_the_scale_of_gradients_changes_nothing(power: int) -> None:
    """By a power of 2, which no rounding sees: loss scaling cannot matter."""
    scaled = [[each * 2.0**power for each in step] for step in GRADIENTS]
    trained = train(layouts((1, 2, 2)), WEIGHTS, scaled, exact=True, **OPTIONS)
    assert_same(trained.weights, expected())


def test_other_modes_stay_near() -> None:
    """Without exact the bits are those of another order of sums: as near as bfloat16 is."""
    for options in ({}, {"kernel": "batched"}, {"exchange": "gather"}):
        trained = train(layouts((2, 2, 1)), WEIGHTS, GRADIENTS, **OPTIONS, **options)
        for mine, theirs, start in zip(trained.weights, expected(), WEIGHTS, strict=True):
            assert float((mine - theirs).norm() / (theirs - start).norm()) < 3e-2


# ---- controls: a fault must show -------------------------------------------------------------------------------------


def differs(**options: Any) -> bool:
    try:
        assert_same(
            train(layouts((2, 2, 1)), WEIGHTS, GRADIENTS, exact=True, **{**OPTIONS, **options}).weights, expected()
        )
    except AssertionError:
        return True
    return False


def test_a_lost_look_ahead_is_noticed() -> None:
    assert not differs()
    assert differs(nesterov=False)


def test_a_scale_of_the_local_shape_is_noticed() -> None:
    right = optimizer_module.scale_factor

    def of_shard(mode: str, m: int, n: int, **options: Any) -> float:
        return right(mode, -(-m // 2), n, **options)

    with mock.patch.object(optimizer_module, "scale_factor", of_shard):
        assert differs()


def test_orthogonalizing_shards_is_noticed() -> None:
    """What happens when nobody tells the optimizer that its parameters are shards."""
    halves = [each[: -(-each.shape[0] // 2)] for each in WEIGHTS]
    gradients = [[each[: len(half)] for each, half in zip(step, halves, strict=True)] for step in GRADIENTS]
    alone = train([flat(half.shape, 1) for half in halves], halves, gradients, exact=True, **OPTIONS)
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(alone.weights, [each[: len(half)] for each, half in zip(expected(), halves, strict=True)])


def test_a_matrix_that_nobody_owns_is_noticed() -> None:
    right = optimizer_module.make_plan

    def without_owner(parameters: Any, rank: int, **options: Any) -> Any:
        plan = right(parameters, rank, **options)
        wave = plan.waves[0]
        lost: PlannedBlock = dataclasses.replace(wave.blocks[0], owner=-1)
        first = dataclasses.replace(wave, blocks=(lost, *wave.blocks[1:]))
        return dataclasses.replace(plan, waves=(first, *plan.waves[1:]))

    with mock.patch.object(optimizer_module, "make_plan", without_owner):
        assert differs()
