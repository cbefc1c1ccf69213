"""The plan against its formulas: bytes, collectives, owners, load; and the same on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon import plan as plan_module
from hp_plugin.core.muon.agreement import check_agreement
from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.newton_schulz import NewtonSchulz
from hp_plugin.core.muon.plan import Exchange, ExchangePlan, MatrixParameter, make_plan
from hp_plugin.core.muon.splits import RowSplit, Stack, blocks_of
from hp_plugin.errors import ConfigurationError
from tests.muon.layouts import Case, bounded, cases, flat, grid
from tests.muon.reference import values
from tests.muon.simulation import SimulatedCommunicators, distribute, simulate, train

NEWTON_SCHULZ = NewtonSchulz(resolve_coefficients("classic"))
SIZES = (1, 2, 3, 4, 8)


def parameter(
    name: str,
    layout: Layout,
    *,
    split: Split | None = None,
    ranks: Sequence[int] | None = None,
    exchange: Exchange = "auto",
    in_one_replica: bool = False,
) -> MatrixParameter:
    view, blocks = blocks_of(name, layout.global_shape, split)
    distribution = distribute(layout) if ranks is None else Distribution(layout, tuple(ranks))
    return MatrixParameter(name, view, blocks, distribution, NEWTON_SCHULZ, exchange, in_one_replica)


def hsdp(shape: tuple[int, ...], replicas: int, shards: int, placement: Placement | None = None) -> Layout:
    return Layout(shape, ("replicate", "shard"), (replicas, shards), (Replicate(), placement or Shard(0)))


def parameters_of(case: Case, **options: Any) -> list[MatrixParameter]:
    together = zip(case.layouts, case.splits, strict=True)
    return [parameter(str(i), layout, split=split, **options) for i, (layout, split) in enumerate(together)]


def plans(make: Callable[[int], Sequence[MatrixParameter]], world: int, **options: Any) -> list[ExchangePlan]:
    """The plan of every rank, with the loads exchanged as in a job."""

    def work(communicators: SimulatedCommunicators) -> ExchangePlan:
        def loads_of(ranks: tuple[int, ...], load: int) -> dict[int, int]:
            return dict(zip(ranks, communicators.over(ranks).all_gather_object(load), strict=True))

        return make_plan(make(communicators.rank), communicators.rank, loads_of=loads_of, **options)

    return simulate(world, work)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def lower_bound(matrices: int, elements: int, shards: int, replicas: int) -> int:
    """Elements that all ranks together must receive, of even shards: each of F R ranks
    N S / F ((F - 1) / (F R) + 1 - 1 / (F R)), so that every owner has its matrix and every rank its part of the others.
    """
    numerator = matrices * elements * (shards - 1 + shards * replicas - 1)
    assert numerator % shards == 0
    return numerator // shards


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("shards", "replicas"), list(itertools.product(SIZES, SIZES)))
def test_bytes_are_the_least_that_even_shards_allow(shards: int, replicas: int, dim: int) -> None:
    shapes = [(24, 48), (48, 24), (24, 24), (72, 24), (24, 48)]
    layouts = [hsdp(shape, replicas, shards, Shard(dim)) for shape in shapes]
    plan = make_plan([parameter(str(i), layout) for i, layout in enumerate(layouts)], 0)
    received = [sum(plan.received_elements(rank)) for rank in range(shards * replicas)]
    assert sum(received) == sum(lower_bound(1, m * n, shards, replicas) for m, n in shapes)


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (4, 3), (8, 2)])
def test_messages_have_these_bytes_and_a_flag_for_each_piece(shards: int, replicas: int) -> None:
    shapes = [(24, 8), (24, 48), (24, 24)]
    layouts = [hsdp(shape, replicas, shards) for shape in shapes]
    trained = train(layouts, values(shapes, 1), [values(shapes, 2)])
    sent = sum(each.received_bytes - each.flag_bytes for each in trained.counters)
    assert sent == 2 * sum(lower_bound(1, m * n, shards, replicas) for m, n in shapes)
    pieces = len(shapes) * (shards - 1 + shards * replicas - 1)
    assert sum(each.flag_bytes for each in trained.counters) == 2 * pieces


def test_counters_tell_bytes_within_and_between_supernodes() -> None:
    from hp_plugin import Topology

    layouts = [hsdp((24, 24), 2, 2)] * 4
    shapes = [layout.global_shape for layout in layouts]
    whole = train(layouts, values(shapes, 1), [values(shapes, 2)], topology=Topology.from_supernode_size(4, 4))
    pairs = train(layouts, values(shapes, 1), [values(shapes, 2)], topology=Topology.from_supernode_size(4, 2))
    unknown = train(layouts, values(shapes, 1), [values(shapes, 2)])
    for one, two, three in zip(whole.counters, pairs.counters, unknown.counters, strict=True):
        assert one.received_bytes_inter == 0
        assert two.received_bytes == one.received_bytes
        # Each rank owns one of four matrices: half of each of two others comes from the other replica.
        assert two.received_bytes_inter == 2 * (24 * 12 + 1) * 2
        assert three.as_dict() == two.as_dict()


@given(case=cases())
@bounded(60)
def test_nobody_receives_more_than_owners_and_shards_need(case: Case) -> None:
    """On any layout: a matrix's missing pieces once at its owner, every other piece of its update once."""
    parameters = parameters_of(case, exchange="a2a")
    world = case.layouts[0].num_ranks
    plan = make_plan(parameters, 0)
    needed = 0
    for wave in plan.waves:
        for block in wave.blocks:
            m, n = block.block.shape
            shard = wave.places[block.owner][1]
            own = block.pieces[shard]
            mine = own.numel if own is not None else 0
            assert sum(piece.numel for piece in block.pieces if piece) == m * n
            needed += m * n - mine + m * n * len(wave.shards) - mine
    assert sum(sum(plan.received_elements(rank)) for rank in range(world)) == needed
    chosen = make_plan(parameters_of(case), 0)  # which may exchange Gram matrices instead
    assert sum(sum(chosen.received_elements(rank)) for rank in range(world)) <= needed


# ---- collectives -----------------------------------------------------------------------------------------------------


@given(case=cases())
@bounded(25)
def test_at_most_two_collectives_a_wave(case: Case) -> None:
    trained = train(case.layouts, values(case.shapes, 1), [values(case.shapes, 2)], splits=case.splits)
    for plan, counters in zip(trained.plans, trained.counters, strict=True):
        legs = sum(wave.goes_out + wave.comes_back for wave in plan.waves)
        assert counters.collectives == legs <= 2 * len(plan.waves)


@pytest.mark.parametrize("exchange", ["a2a", "gather"])
def test_a_domain_whose_matrices_fit_a_wave_has_two_collectives_however_many_they_are(exchange: Exchange) -> None:
    layouts = [hsdp(shape, 2, 2) for shape in [(8, 8), (8, 8), (12, 6), (6, 30), (5, 7)] * 4]
    plan = make_plan([parameter(str(i), layout, exchange=exchange) for i, layout in enumerate(layouts)], 0)
    assert [(wave.goes_out, wave.comes_back, wave.mode) for wave in plan.waves] == [(True, True, exchange)]


def test_whole_matrices_stay_where_they_are() -> None:
    """Experts sharded by expert, tensors of one rank, meshes of one rank: no byte, no collective."""
    experts = flat((4, 6, 5), 2)
    trained = train([experts, experts], values([(4, 6, 5)] * 2, 1), [values([(4, 6, 5)] * 2, 2)], splits=[Stack()] * 2)
    for plan, counters in zip(trained.plans, trained.counters, strict=True):
        assert {wave.mode for wave in plan.waves} == {"local"}
        assert (counters.collectives, counters.received_bytes, counters.newton_schulz_calls) == (0, 0, 4)
    for distribution in (None, distribute(flat((6, 5), 1)), distribute(hsdp((6, 5), 1, 1))):
        view, blocks = blocks_of("w", (6, 5))
        (wave,) = make_plan([MatrixParameter("w", view, blocks, distribution, NEWTON_SCHULZ)], 0).waves
        assert (wave.mode, wave.goes_out, wave.comes_back) == ("local", False, False)


def test_heads_that_shards_hold_whole_stay_there() -> None:
    aligned = parameter("aligned", flat((8, 6), 2), split=RowSplit(("a", "b")))
    crossing = parameter("crossing", flat((8, 6), 2), split=RowSplit(("a", "b"), (3, 5)))
    plan = make_plan([aligned, crossing], 0)
    modes = {(plan.parameters[b.parameter].name, b.block.name): w.mode for w in plan.waves for b in w.blocks}
    assert modes[("aligned", "a")] == modes[("aligned", "b")] == modes[("crossing", "a")] == "local"
    assert modes[("crossing", "b")] == "a2a"


def test_replicas_of_whole_matrices_only_get_updates() -> None:
    plan = make_plan([parameter("w", hsdp((6, 5), 3, 1))], 0)
    (wave,) = plan.waves
    assert (wave.goes_out, wave.comes_back) == (False, True)
    assert [plan.received_elements(rank) for rank in range(3)] == [(0, 0), (0, 30), (0, 30)]


def test_large_shard_groups_gather_and_others_do_not() -> None:
    limit = plan_module.MAX_A2A_PEERS
    for ranks, mode in ((limit, "a2a"), (limit + 1, "gather")):
        (wave,) = make_plan([parameter("w", flat((4 * limit, 3), ranks))], 0).waves
        assert wave.mode == mode
    (wave,) = make_plan([parameter("w", flat((4 * limit, 3), limit + 1), exchange="a2a")], 0).waves
    assert wave.mode == "a2a"


def test_waves_bound_what_one_rank_holds() -> None:
    layouts = [flat((16, 16), 4) for _ in range(40)]
    nbytes = 16 * 16 * 2
    plan = make_plan([parameter(str(i), each) for i, each in enumerate(layouts)], 0, wave_bytes=3 * nbytes)
    assert len(plan.waves) == 4  # 10 matrices a rank, 3 a wave
    for wave in plan.waves:
        for rank in range(4):
            assert sum(block.owner == rank for block in wave.blocks) <= 3
    assert sum(len(wave.blocks) for wave in plan.waves) == 40


# ---- owners ----------------------------------------------------------------------------------------------------------


@given(case=cases())
@bounded(60)
def test_every_matrix_has_one_owner_and_all_ranks_agree_on_it(case: Case) -> None:
    parameters = parameters_of(case)
    world = case.layouts[0].num_ranks
    made = [make_plan(parameters, rank) for rank in range(world)]
    found = [(block.parameter, block.block.name) for wave in made[0].waves for block in wave.blocks]
    assert sorted(found) == sorted((i, block.name) for i, each in enumerate(parameters) for block in each.blocks)
    for plan in made:
        assert plan.waves == made[0].waves
        assert plan.loads == made[0].loads
        for wave in plan.waves:
            for block in wave.blocks:
                assert wave.places[block.owner][0] == block.replica
    assert sum(made[0].loads.values()) == sum(block.flops for wave in made[0].waves for block in wave.blocks)


@given(case=cases())
@bounded(30)
def test_momentum_of_one_replica_needs_owners_of_one_replica(case: Case) -> None:
    plan = make_plan(parameters_of(case, in_one_replica=True), 0)
    replicas: dict[int, set[int]] = {}
    for wave in plan.waves:
        for block in wave.blocks:
            replicas.setdefault(block.parameter, set()).add(block.replica)
    assert all(len(each) == 1 for each in replicas.values())


SHOW_OWNERS = """
from tests.muon.test_plan import gpt
from hp_plugin.core.muon.plan import make_plan
plan = make_plan(gpt(2, 2), 3)
print([(b.parameter, b.block.name, b.owner) for w in plan.waves for b in w.blocks], [p.digest for p in plan.parameters])
"""


@pytest.mark.full
def test_owners_and_digests_are_the_same_in_every_process() -> None:
    """Hashes of strings differ between interpreters; nothing here may follow from them. Slow, as it imports torch."""
    said = {
        subprocess.run(
            [sys.executable, "-c", SHOW_OWNERS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


# ---- load ------------------------------------------------------------------------------------------------------------


def gpt(replicas: int, shards: int, *, layers: int = 12, width: int = 768) -> list[MatrixParameter]:
    """The hidden matrices of a GPT: fused QKV, output, and an MLP of four times the width."""
    made = []
    for layer in range(layers):
        for name, rows, cols, split in (
            ("qkv", 3 * width, width, RowSplit(("q", "k", "v"))),
            ("out", width, width, None),
            ("up", 4 * width, width, None),
            ("down", width, 4 * width, None),
        ):
            made.append(parameter(f"{layer}.{name}", hsdp((rows, cols), replicas, shards), split=split))
    return made


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (2, 4), (1, 9), (3, 3)])
def test_load_of_a_gpt_is_even(replicas: int, shards: int) -> None:
    plan = make_plan(gpt(replicas, shards), 0)
    assert sum(len(wave.blocks) for wave in plan.waves) >= 8 * replicas * shards
    assert plan.flops_imbalance <= 1.10
    assert max(plan.loads.values()) * len(plan.loads) == pytest.approx(plan.flops_imbalance * sum(plan.loads.values()))


def moe(rank: int, *, experts: int, expert_ranks: int, world: int = 8) -> list[MatrixParameter]:
    """Experts over groups of `expert_ranks`, replicated over them; dense matrices over all ranks."""
    replicas = world // expert_ranks
    made = []
    for layer in range(8):
        for name, rows, cols in (("up", 512, 256), ("down", 256, 256)):
            layout = hsdp((experts, rows, cols), replicas, expert_ranks)
            made.append(parameter(f"{layer}.experts.{name}", layout, split=Stack()))
        for name, rows, cols in (
            ("q", 512, 512),
            ("k", 512, 512),
            ("v", 512, 512),
            ("out", 512, 512),
            ("up", 1024, 512),
        ):
            made.append(parameter(f"{layer}.{name}", flat((rows, cols), world)))
    return made


@pytest.mark.parametrize(
    ("experts", "expert_ranks"), [(8, 8), (16, 8), (10, 8), (4, 4), (10, 4), (6, 4), (3, 2)]
)  # even, and so that some ranks hold fewer experts than others
def test_experts_and_dense_matrices_share_one_table_of_loads(experts: int, expert_ranks: int) -> None:
    made = plans(lambda rank: moe(rank, experts=experts, expert_ranks=expert_ranks), 8)
    for plan in made:
        assert plan.flops_imbalance <= 1.10
        assert plan.loads == made[0].loads
        assert len(plan.loads) == 8


def test_experts_of_separate_groups_count_when_dense_matrices_are_distributed() -> None:
    """Ranks 0 and 1 hold experts of their own, 2 and 3 fewer of them: the dense matrices go to those."""

    def of_rank(rank: int) -> list[MatrixParameter]:
        group = (0, 1) if rank < 2 else (2, 3)
        count = 6 if rank < 2 else 2
        experts = parameter(f"experts{group[0]}", flat((count, 32, 32), 2), split=Stack(), ranks=group)
        dense = [parameter(f"dense{index}", flat((32, 32), 4)) for index in range(8)]
        return [experts, *dense]

    made = plans(of_rank, 4)
    flops = NEWTON_SCHULZ.flops(32, 32)
    for rank, plan in enumerate(made):
        assert plan.loads[rank] == 4 * flops
        assert sum(block.owner == rank for wave in plan.waves for block in wave.blocks) == 4
    assert [block.owner for wave in made[0].waves for block in wave.blocks if block.owner >= 2] == [
        block.owner for wave in made[3].waves for block in wave.blocks if block.owner >= 2 and len(wave.ranks) == 4
    ]


# ---- agreement -------------------------------------------------------------------------------------------------------


def digests(parameters: Sequence[MatrixParameter]) -> dict[str, int]:
    return {each.name: each.digest for each in parameters}


def other(each: MatrixParameter, **changes: Any) -> MatrixParameter:
    return dataclasses.replace(each, **changes)


W = parameter("layers.0.w", flat((8, 6), 2))
V = parameter("layers.0.v", flat((6, 6), 2))


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ([other(W, newton_schulz=NewtonSchulz(resolve_coefficients("classic", 4))), V], r"layers\.0\.w has other"),
        (
            [W, other(V, newton_schulz=dataclasses.replace(NEWTON_SCHULZ, dtype=torch.float32))],
            r"layers\.0\.v has other",
        ),
        ([W, other(V, exchange="gather")], r"layers\.0\.v has other"),
        ([W, other(V, in_one_replica=True)], r"layers\.0\.v has other"),
        ([parameter("layers.0.w", flat((8, 6), 2), split=RowSplit(("a", "b"))), V], r"layers\.0\.w has other"),
        ([parameter("layers.0.w", flat((8, 6), 2, Shard(1))), V], r"layers\.0\.w has other"),
        ([parameter("layers.0.w", flat((8, 6), 2), ranks=(1, 0)), V], r"layers\.0\.w has other"),
        ([W], r"layers\.0\.v is on one of them"),
        ([W, V, parameter("extra", flat((6, 6), 2))], r"extra is on one of them"),
        ([V, W], "in another order"),
    ],
)
def test_a_disagreement_names_the_parameter_and_the_rank(theirs: list[MatrixParameter], sentence: str) -> None:
    check_agreement([W, V], [digests([W, V])] * 3, (0, 1, 2))
    with pytest.raises(ConfigurationError, match=sentence) as failure:
        check_agreement([W, V], [digests([W, V]), digests([W, V]), digests(theirs)], (0, 1, 5))
    assert "rank 5" in str(failure.value)


@pytest.mark.parametrize("option", [{"steps": 6}, {"momentum": 0.9}, {"weight_decay": 0.0}, {"scale": "none"}], ids=str)
def test_ranks_that_disagree_learn_it_before_anything_moves(option: dict[str, Any]) -> None:
    from hp_plugin.core.muon.optimizer import HyperMuon

    def work(communicators: SimulatedCommunicators) -> None:
        layout = flat((6, 4), 2)
        param, bias = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3))
        optimizer = HyperMuon(
            [
                {"params": [("layers.3.weight", param)]},
                {"params": [("layers.3.bias", bias)], "algorithm": "adamw"},
            ],
            **(option if communicators.rank else {}),
            distributions={param: distribute(layout)},
            communicators=communicators,
        )
        param.grad, bias.grad = torch.ones(3, 4), torch.ones(3)
        with pytest.raises(ConfigurationError, match=r"layers\.3\.weight has other blocks, layout or options"):
            optimizer.step()
        assert bool((param == 1).all()) and bool((bias == 1).all())
        assert bool((optimizer.state[param]["momentum_buffer"] == 0).all())

    simulate(2, work)


def test_domains_in_a_ring_do_not_wait_for_one_another() -> None:
    """Each rank shares a matrix with the next one and lists it first: by the order of parameters all would wait."""
    from hp_plugin.core.muon.optimizer import HyperMuon

    def work(communicators: SimulatedCommunicators) -> int:
        rank, layout = communicators.rank, flat((4, 4), 2)
        pairs = [tuple(sorted((rank, (rank + step) % 4))) for step in (1, 3)]
        params = [torch.nn.Parameter(torch.ones(2, 4)) for _ in pairs]
        optimizer = HyperMuon(
            [(f"pair{pair}", param) for pair, param in zip(pairs, params, strict=True)],
            distributions={param: Distribution(layout, pair) for pair, param in zip(pairs, params, strict=True)},
            communicators=communicators,
        )
        for param in params:
            param.grad = torch.eye(4)[2 * rank % 4 : 2 * rank % 4 + 2]
        optimizer.step()
        return optimizer.counters.newton_schulz_calls

    assert sum(simulate(4, work)) == 4


def test_the_table_says_what_travels() -> None:
    table = make_plan([parameter("w", hsdp((8, 6), 2, 2)), parameter("e", flat((4, 4), 4))], 0).table()
    lines = table.splitlines()
    assert len(lines) == 2 + 2
    assert "a2a" in lines[1]
    assert lines[1].split()[-2:] == ["24", "72"]  # half a matrix out; all but the owner's half of two replicas back
    assert "load of the busiest rank" in lines[-1]


# ---- controls --------------------------------------------------------------------------------------------------------


def test_owners_by_turns_would_fail_the_tests_of_load() -> None:
    def by_turns(blocks: Any, shards: Any, loads: dict[int, int], **_: Any) -> Any:
        everyone = [(replica, each) for replica, ranks in enumerate(shards) for each in ranks]
        owned = []
        for index, block in enumerate(blocks):
            replica, owner = everyone[index % len(everyone)]
            loads[owner] = loads.get(owner, 0) + block.flops
            owned.append(dataclasses.replace(block, owner=owner, replica=replica))
        return owned

    with mock.patch.object(plan_module, "assign_owners", by_turns):
        assert make_plan(gpt(2, 3), 0).flops_imbalance > 1.10


def test_owners_outside_the_first_replica_count_in_the_bound() -> None:
    """An exchange without deduplication over replicas receives more than the bound that these tests ask for."""
    shards, replicas = 2, 2
    per_replica = make_plan([parameter("w", flat((24, 24), shards))], 0)
    twice = replicas * sum(sum(per_replica.received_elements(rank)) for rank in range(shards))
    assert twice == replicas * 24 * 24 // 2 * 2
    assert lower_bound(1, 24 * 24, shards, replicas) == 24 * 24 * 4 // 2
    plan = make_plan([parameter("w", grid((24, 24), (replicas, shards, 1)))], 0)
    assert sum(sum(plan.received_elements(rank)) for rank in range(4)) == 24 * 24 * 2
