"""The bytes of all copies and of all messages of a step, observed at dispatch, against the formula.

What a micro-batch of the sharded model writes beyond what the plain model writes is the engine's. Native kernels write
past torch's dispatcher, so these runs go without them; `Counters.copied_bytes` is held to the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, clip_grad_norm_
from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.topology import Topology, TrafficRecorder
from tests.fsdp.public_bugs.towers import Tower, shard
from tests.fsdp.twins import make_mesh
from tests.fsdp.writes import Dtypes, Piece, UnitFormula, WriteLog
from tests.support import run_ranks

FP32, BF16 = torch.float32, torch.bfloat16
DEPTH = 2


@dataclass(frozen=True)
class Configuration:
    """A way to shard a tower.

    Attributes:
        width: Of the tower. 192 divides by every shard group, 193 by none; both make projections that travel alone.
        policy: Mixed precision.
        dtypes: What it means for shards, full parameters, sums and wire.
        inner: Shard every parameter on its last dim.
    """

    width: int
    policy: MixedPrecisionPolicy
    dtypes: Dtypes
    inner: bool = False


MASTERS = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, master_dtype=FP32)
NARROW = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, master_dtype=FP32, inter_reduce_dtype=BF16)
PLAIN = MixedPrecisionPolicy()
CONFIGURATIONS = {
    "fp32": Configuration(192, PLAIN, Dtypes(FP32, FP32, FP32, FP32)),
    "bf16 with fp32 masters": Configuration(192, MASTERS, Dtypes(FP32, BF16, FP32, FP32)),
    "bf16 between supernodes": Configuration(192, NARROW, Dtypes(FP32, BF16, FP32, BF16)),
    "uneven rows": Configuration(193, PLAIN, Dtypes(FP32, FP32, FP32, FP32)),
    "columns": Configuration(192, PLAIN, Dtypes(FP32, FP32, FP32, FP32), inner=True),
    "tiny": Configuration(40, PLAIN, Dtypes(FP32, FP32, FP32, FP32)),
}
# One micro-batch after another: whether it is reduced between supernodes, and whether `.grad` is dropped before it.
MICRO = [(True, True), (True, False), (False, True), (False, False), (True, False)]


def observe(*, replicate: int, shard_size: int, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """By configuration and micro-batch: what was written, sent and counted."""
    mesh = make_mesh(replicate, shard_size)
    topology = Topology.from_supernode_size(replicate * shard_size, shard_size)
    return {key: observe_one(mesh, topology, CONFIGURATIONS[key]) for key in names}


def observe_one(mesh: Any, topology: Topology, configuration: Configuration) -> list[dict[str, Any]]:
    torch.manual_seed(2)
    placement = (lambda p: Shard(p.ndim - 1)) if configuration.inner else None
    model = shard(
        Tower(DEPTH, configuration.width),
        mesh,
        mp_policy=configuration.policy,
        shard_placement_fn=placement,
        bucket_bytes=1,
    )
    plain = Tower(DEPTH, configuration.width).to(configuration.dtypes.compute)
    inputs = torch.randn(4, configuration.width, dtype=configuration.dtypes.compute)
    plain(inputs).backward()
    plain.zero_grad()
    with WriteLog() as compute:
        plain(inputs).backward()
    optimizer = HyperAdamW(model.parameters(), lr=0.0)
    seen = []
    for is_steady in (False, True):
        for crosses, drops in MICRO:
            if drops:
                model.zero_grad()
            model.set_requires_all_reduce(crosses)
            model.fsdp_counters().reset()
            with TrafficRecorder(topology) as recorder, WriteLog() as log:
                model(inputs).backward()
                wait_for_lane(model)
            if is_steady:
                traffic = recorder.traffic
                assert not traffic.unmodelled
                seen.append(
                    {
                        "writes": log.bytes_beyond(compute),
                        "counted": model.fsdp_counters().copied_bytes,
                        "intra": traffic.intra_bytes,
                        "inter": traffic.inter_bytes,
                    }
                )
    with WriteLog() as log:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, _ in log.calls} & {"copy_", "_to_copy", "clone", "cat", "_foreach_copy_"}
    seen.append({"moved by the optimizer": sorted(moved)})
    return seen


def wait_for_lane(model: nn.Module) -> None:
    """A backward that is not reduced between supernodes returns while its sums are still being formed."""
    unit = unit_of(model)
    assert unit is not None
    unit.lane.submit(lambda: None).wait()


def formulas(configuration: Configuration, *, shard_size: int, rank: int) -> tuple[list[UnitFormula], UnitFormula]:
    """Of the layers, and of the root."""

    def unit(module: nn.Module) -> UnitFormula:
        pieces = []
        for parameter in module.parameters():
            dim = parameter.ndim - 1 if configuration.inner else 0
            pieces.append(Piece(tuple(parameter.shape), dim, shard_size, rank))
        return UnitFormula(pieces, configuration.dtypes)

    tower = Tower(DEPTH, configuration.width)
    return [unit(layer) for layer in tower.layers], unit(tower.head)


def expected_writes(configuration: Configuration, mesh: tuple[int, int], rank: int, micro: int) -> Counter[str]:
    """What micro-batch number `micro` of `MICRO` writes on a rank of the shard group."""
    crosses, drops = MICRO[micro]
    layers, root = formulas(configuration, shard_size=mesh[1], rank=rank)
    size = configuration.dtypes.sums.itemsize
    has_grad, has_partial = micro == 1, micro >= 3
    total: Counter[str] = Counter()
    for unit in (*layers, root):
        gathers = 1 if unit is root else 2  # the root is kept between forward and backward
        for _ in range(gathers):
            total += unit.gather()
        total += unit.reduce()
        buffer = unit.flat * size
        if drops or has_grad:  # a buffer is made: the one of .grad, or one beside it
            total["fills"] += unit.gaps * size
        if has_partial:
            total["sums"] += buffer  # the new sum is added to the one that waits
        if not crosses:
            continue
        if mesh[0] > 1:
            total += unit.cross()
        if has_grad:
            total["sums"] += buffer
        if math.prod(mesh) > 1:
            total["scales"] += buffer
    return +total


def expected_in_shared_memory(configuration: Configuration, mesh: tuple[int, int], rank: int, micro: int) -> int:
    """Bytes that micro-batch number `micro` of `MICRO` copies where ranks share memory.

    What `Counters.copied_bytes` says: native kernels write past dispatch, and without them there is no shared memory.
    """
    crosses = MICRO[micro][0]
    layers, root = formulas(configuration, shard_size=mesh[1], rank=rank)
    moves = sum(unit.publish() + unit.write_into_ring() for unit in (*layers, root))
    return moves + sum(unit.cross()["moves"] for unit in (*layers, root)) * (crosses and mesh[0] > 1)


def expected_traffic(configuration: Configuration, mesh: tuple[int, int], micro: int) -> tuple[float, float]:
    """Bytes that a rank sends to its own supernode and to others."""
    layers, root = formulas(configuration, shard_size=mesh[1], rank=0)
    units = [*layers, root]
    intra = sum((1 if u is root else 2) * u.sent_by_gather() + u.sent_by_reduce() for u in units)
    crossing = sum(u.flat for u in units) * configuration.dtypes.wire.itemsize if MICRO[micro][0] else 0
    return intra, 2 * (mesh[0] - 1) / mesh[0] * crossing


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (1, 4), (4, 1)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_copies_and_messages_of_every_micro_batch_follow_the_formula(mesh: tuple[int, int]) -> None:
    results = run_ranks(
        mesh[0] * mesh[1],
        observe,
        env={"HP_NATIVE_LIBRARY": "none"},
        replicate=mesh[0],
        shard_size=mesh[1],
        names=list(CONFIGURATIONS),
    )
    problems = []
    for rank, by_name in enumerate(results):
        for key, seen in by_name.items():
            configuration = CONFIGURATIONS[key]
            for micro, found in enumerate(seen[:-1]):
                writes = expected_writes(configuration, mesh, rank % mesh[1], micro)
                intra, inter = expected_traffic(configuration, mesh, micro)
                expected = {"writes": writes, "counted": writes["moves"], "intra": intra, "inter": inter}
                problems += [
                    f"rank {rank}, {key}, micro-batch {micro}: {what} {found[what]}, not {value}"
                    for what, value in expected.items()
                    if found[what] != value
                ]
            if seen[-1]["moved by the optimizer"]:
                problems.append(f"rank {rank}, {key}: the optimizer runs {seen[-1]}")
    assert not problems, "\n".join(problems[:30])


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_copies_in_shared_memory_follow_the_formula(mesh: tuple[int, int]) -> None:
    names = list(CONFIGURATIONS)
    env = {TRANSPORT_VARIABLE: "shm"}
    results = run_ranks(mesh[0] * mesh[1], observe, env=env, replicate=mesh[0], shard_size=mesh[1], names=names)
    problems = []
    for rank, by_name in enumerate(results):
        for key, seen in by_name.items():
            for micro, found in enumerate(seen[:-1]):
                counted = expected_in_shared_memory(CONFIGURATIONS[key], mesh, rank % mesh[1], micro)
                inter = expected_traffic(CONFIGURATIONS[key], mesh, micro)[1]
                expected = {"counted": counted, "intra": 0, "inter": inter}
                problems += [
                    f"rank {rank}, {key}, micro-batch {micro}: {what} {found[what]}, not {value}"
                    for what, value in expected.items()
                    if found[what] != value
                ]
    assert not problems, "\n".join(problems[:30])
