"""The exchange alone, with a mere shift of elements for orthogonalization: every layout gives the bits of one process.

The identity would not do: what goes to a wrong owner or in a wrong order and comes back the same way would not show.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.newton_schulz import NewtonSchulz
from hp_plugin.core.muon.splits import Convolution, GroupedRows, Interleaved, PerHead, RowSplit, Stack
from hp_plugin.core.muon.waves import WaveRunner
from tests.muon.layouts import AXES, Case, bounded, cases, flat, grid, strided
from tests.muon.reference import reference_run, rolled, values
from tests.muon.simulation import Trained, assert_same, train

EXCHANGES = ("a2a", "gather")
FLOAT32: dict[str, Any] = {"ns_dtype": torch.float32}


@contextlib.contextmanager
def orthogonalizing(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Newton-Schulz replaced by a function of a stack of matrices."""
    with mock.patch.object(NewtonSchulz, "__call__", lambda self, matrices: function(matrices).clone()):
        yield


def moved(case: Case, exchange: str, *, steps: int = 2, **options: Any) -> Trained:
    """Trains a case with elements shifted, and asserts that every bit is that of one process."""
    weights = values(case.shapes, 1)
    gradients = [values(case.shapes, 2 + step) for step in range(steps)]
    with orthogonalizing(rolled):
        trained = train(case.layouts, weights, gradients, splits=case.splits, exchange=exchange, **FLOAT32, **options)
    expected = reference_run(weights, gradients, splits=case.splits, orthogonalize=rolled)
    assert_same(trained.weights, expected.weights)
    assert_same(trained.momenta, expected.buffers)
    assert sum(each.newton_schulz_calls for each in trained.counters) == sum(len(blocks) for _, blocks in expected.cuts)
    return trained


# ---- named layouts ---------------------------------------------------------------------------------------------------

QKV = Interleaved(3, ("q", "k", "v"), (4, 1, 1))

LAYOUTS: dict[str, Case] = {
    "even rows": Case((flat((8, 5), 4), flat((4, 9), 4)), (None, None)),
    "uneven rows": Case((flat((7, 5), 4), flat((10, 3), 4)), (None, None)),
    "fewer rows than ranks": Case((flat((2, 6), 4), flat((1, 5), 4), flat((3, 3), 4)), (None,) * 3),
    "columns": Case((flat((5, 9), 4, Shard(1)), flat((3, 2), 4, Shard(1))), (None, None)),
    "last dim by a negative number": Case((flat((5, 9), 3, Shard(-1)),), (None,)),
    "replicas alone": Case((flat((6, 5), 3, Replicate()), flat((2, 3), 3, Replicate())), (None, None)),
    "one rank": Case((flat((6, 5), 1), flat((2, 3), 1, Replicate())), (None, None)),
    "replicas of shards": Case(tuple(grid(s, (2, 3, 1)) for s in [(7, 4), (2, 5), (6, 6)]), (None,) * 3),
    "FSDP and TP on different dims": Case(tuple(grid(s, (1, 2, 3)) for s in [(7, 7), (4, 2), (2, 9)]), (None,) * 3),
    "FSDP and TP on one dim, strided": Case(
        tuple(strided(s, (1, 2, 3)) for s in [(12, 3), (7, 4), (2, 2)]), (None,) * 3
    ),
    "replicas, FSDP and TP, strided": Case(tuple(strided(s, (2, 2, 2)) for s in [(8, 3), (9, 5)]), (None,) * 2),
    "TP after FSDP on one dim": Case(
        (grid((11, 4), (1, 2, 3), tensor=0), grid((3, 4), (1, 2, 3), tensor=0)), (None,) * 2
    ),
    "axes of size 1 everywhere": Case(
        (
            Layout((5, 4), ("a", "b", "c", "d"), (1, 3, 1, 1), (Shard(1), Shard(0), Replicate(), Shard(0))),
            Layout((5, 4), ("a", "b", "c", "d"), (1, 3, 1, 1), (Replicate(), Replicate(), Shard(0), Shard(1))),
        ),
        (None, None),
    ),
    "experts by expert": Case((flat((4, 3, 5), 2), flat((5, 2, 2), 2)), (Stack(), Stack())),
    "experts by row and by column": Case(
        (flat((3, 5, 4), 3, Shard(1)), flat((2, 4, 7), 3, Shard(2))), (Stack(), Stack())
    ),
    "experts by expert and row": Case((grid((3, 5, 4), (1, 2, 2), shard=0, tensor=1),), (Stack(),)),
    "experts by expert, replicated": Case((grid((3, 5, 4), (2, 2, 1)),), (Stack(),)),
    "experts in one matrix": Case((flat((12, 5), 3), flat((12, 5), 4, Shard(1)))[:1], (GroupedRows(3),)),
    "convolutions by output": Case((flat((7, 3, 2, 2), 3), flat((4, 2, 3), 3)), (Convolution(1), Convolution(1))),
    "convolutions by input": Case((flat((4, 5, 2, 3), 3, Shard(1)),), (Convolution(1),)),
    "interleaved rows": Case((flat((18, 7), 4), flat((18, 7), 4, Shard(1))), (QKV, QKV)),
    "interleaved rows, strided": Case((strided((18, 7), (1, 2, 2)),), (QKV,)),
    "gate and up": Case((flat((10, 3), 4),), (RowSplit(("gate", "up")),)),
    "heads of rows and of columns": Case((flat((6, 5), 4), flat((5, 6), 4)), (PerHead(3), PerHead(2, dim=1))),
    "several layouts at once": Case(
        (
            grid((7, 4), (2, 2, 2)),
            Layout((6, 6), AXES, (2, 2, 2), (Shard(0), Replicate(), Replicate())),
            Layout((6, 5), AXES, (2, 2, 2), (Replicate(), Replicate(), Shard(1))),
            Layout((5, 6), AXES, (2, 2, 2), (Replicate(),) * 3),
            Layout((9, 3), AXES, (2, 2, 2), (Shard(0), _StridedShard(0, split_factor=2), Shard(0))),
        ),
        (None,) * 5,
    ),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_process(name: str, exchange: str) -> None:
    moved(LAYOUTS[name], exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
@given(case=cases())
@bounded(60)
def test_generated_layouts_give_the_bits_of_one_process(exchange: str, case: Case) -> None:
    moved(case, exchange, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("exchange", EXCHANGES)
@given(case=cases(max_ranks=16))
@bounded(600)
def test_many_generated_layouts_give_the_bits_of_one_process(exchange: str, case: Case) -> None:
    moved(case, exchange, steps=2, wave_bytes=100)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("wave_bytes", [1, 200, 1 << 30])
def test_the_number_of_waves_changes_nothing(wave_bytes: int, exchange: str) -> None:
    case = LAYOUTS["several layouts at once"]
    trained = moved(case, exchange, wave_bytes=wave_bytes)
    waves = len(trained.plans[0].waves)
    assert waves >= (5 if wave_bytes == 1 else 1)


@pytest.mark.parametrize("momentum_placement", ["replicated", "owner"])
def test_where_momentum_is_kept_changes_nothing(momentum_placement: str) -> None:
    moved(LAYOUTS["several layouts at once"], "a2a", steps=3, momentum_placement=momentum_placement)


# ---- what arrives where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["replicas, FSDP and TP, strided", "interleaved rows", "several layouts at once"])
def test_every_matrix_is_orthogonalized_once_and_of_its_own_elements(name: str, exchange: str) -> None:
    """The gradient of each matrix is a number of its own, so a foreign element cannot go unseen."""
    case = LAYOUTS[name]
    reference = reference_run(values(case.shapes, 1), [], splits=case.splits)
    numbers = iter(range(1, 1000))
    fills = []
    for shape, (view, blocks) in zip(case.shapes, reference.cuts, strict=True):
        fill = torch.zeros(view.depth, view.rows, view.cols)
        for block in blocks:
            for rows in block.rows:
                for cols in block.cols:
                    fill[block.layer, rows.start : rows.start + rows.length, cols.start : cols.start + cols.length] = (
                        next(numbers) if rows is block.rows[0] else fill[block.layer, block.rows[0].start, cols.start]
                    )
        fills.append(fill.view(shape))
    seen: list[int] = []
    lock = threading.Lock()

    def see(matrices: Tensor) -> Tensor:
        for matrix in matrices:
            assert bool((matrix == matrix[0, 0]).all()), "a matrix has elements of another one"
            with lock:
                seen.append(int(matrix[0, 0]))
        return -matrices

    weights = [torch.zeros(shape) for shape in case.shapes]
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "lr": 1.0, "scale": "none"}
    with orthogonalizing(see):
        trained = train(case.layouts, weights, [fills], splits=case.splits, exchange=exchange, **FLOAT32, **options)
    assert sorted(seen) == sorted({int(each) for fill in fills for each in fill.flatten()})
    assert len(seen) == sum(len(blocks) for _, blocks in reference.cuts)
    assert_same(trained.weights, fills)


def test_matrices_travel_in_the_dtype_of_the_iteration() -> None:
    case = LAYOUTS["uneven rows"]
    halves = train(case.layouts, values(case.shapes, 1), [values(case.shapes, 2)])
    floats = train(case.layouts, values(case.shapes, 1), [values(case.shapes, 2)], ns_dtype=torch.float32)
    for half, float_ in zip(halves.counters, floats.counters, strict=True):
        assert 2 * half.received_bytes == float_.received_bytes > 0


# ---- gradients that some ranks lack ----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_parameter_without_gradient_on_any_rank_is_left_alone(exchange: str) -> None:
    case = LAYOUTS["replicas of shards"]
    weights, first, second = values(case.shapes, 1), values(case.shapes, 2), values(case.shapes, 3)
    lacking = [first, [second[0], None, second[2]]]
    with orthogonalizing(rolled):
        trained = train(case.layouts, weights, lacking, exchange=exchange, **FLOAT32)
    expected = reference_run(weights, lacking, orthogonalize=rolled)
    assert_same(trained.weights, expected.weights)
    assert_same(trained.momenta, expected.buffers)
    assert sum(each.newton_schulz_calls for each in trained.counters) == 2


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_without_gradient_counts_as_one_with_zeros(exchange: str) -> None:
    layouts = [flat((6, 4), 3), flat((7, 5), 3)]
    shapes = [layout.global_shape for layout in layouts]
    weights, gradients = values(shapes, 1), [values(shapes, 2), values(shapes, 3)]
    zeroed = [[each.clone() for each in of_step] for of_step in gradients]
    for of_step in zeroed:
        of_step[0][2:4] = 0  # rank 1 holds rows 2 and 3 of parameter 0
    with orthogonalizing(rolled):
        trained = train(
            layouts,
            weights,
            gradients,
            has_gradient=lambda rank, index: (rank, index) != (1, 0),
            exchange=exchange,
            **FLOAT32,
        )
    expected = reference_run(weights, zeroed, orthogonalize=rolled)
    for mine, theirs in zip([*trained.weights, *trained.momenta], [*expected.weights, *expected.buffers], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_collectives_do_not_depend_on_gradients() -> None:
    case = LAYOUTS["several layouts at once"]
    weights, gradients = values(case.shapes, 1), values(case.shapes, 2)
    every = train(case.layouts, weights, [gradients])
    none = train(case.layouts, weights, [[None] * len(gradients)])
    for a, b in zip(every.counters, none.counters, strict=True):
        assert a.collectives == b.collectives > 0
        assert a.received_bytes == b.received_bytes > 0
    assert sum(each.newton_schulz_calls for each in none.counters) == 0
    assert_same(none.weights, weights)


# ---- controls: a fault must show -------------------------------------------------------------------------------------


def _later_by_one(self: WaveRunner, shard: int, owners: Any) -> Any:
    """Takes the pieces of the next shard for those of this one."""
    return _ITEMS(self, (shard + 1) % len(self.wave.shards[0]), owners)


_ITEMS = WaveRunner._items


def test_a_wrong_shard_order_is_noticed() -> None:
    with mock.patch.object(WaveRunner, "_items", _later_by_one), pytest.raises((AssertionError, RuntimeError)):
        moved(LAYOUTS["even rows"], "a2a")


def test_pieces_swapped_between_two_shards_are_noticed() -> None:
    from hp_plugin.core.muon.distribution import Distribution

    right = Distribution.shard_coordinates.func  # type: ignore[attr-defined]
    swapped = property(lambda self: tuple(reversed(right(self))))
    with mock.patch.object(Distribution, "shard_coordinates", swapped), pytest.raises(AssertionError, match="differs"):
        moved(LAYOUTS["even rows"], "a2a")


def test_owners_that_one_rank_sees_otherwise_are_noticed() -> None:
    """Two matrices of one shape: message sizes agree, so only values can tell."""
    import dataclasses

    from hp_plugin.core.muon import optimizer

    make_plan = optimizer.make_plan

    def otherwise(parameters: Any, rank: int, **options: Any) -> Any:
        plan = make_plan(parameters, rank, **options)
        if rank != 0:
            return plan
        (wave,) = plan.waves
        first, second = wave.blocks
        exchanged = (
            dataclasses.replace(first, owner=second.owner, replica=second.replica),
            dataclasses.replace(second, owner=first.owner, replica=first.replica),
        )
        return dataclasses.replace(plan, waves=(dataclasses.replace(wave, blocks=exchanged),))

    case = Case((flat((6, 4), 3), flat((6, 4), 3)), (None, None))
    moved(case, "a2a")
    with mock.patch.object(optimizer, "make_plan", otherwise), pytest.raises((AssertionError, RuntimeError)):
        moved(case, "a2a")
