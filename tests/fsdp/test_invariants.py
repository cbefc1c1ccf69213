"""What holds for every configuration. Where each of the engine's invariants is tested:

1. Fp32 losses, norms and weights are those of stock data parallelism: here over 12 steps; over 2 for every combination
   of options in `test_equivalence`.
2. After backward everything is resharded, and with collectives no full tensor is alive: `public_bugs/test_recompute`,
   and `twins.assert_at_rest` in all behaviour tests.
3. Exact counts: copies and traffic in `test_invariants_counts`, collectives in `public_bugs/test_recompute` and
   `public_bugs/test_host`, DTensors in the latter.
4. Every rank enters every collective in the same order: `test_invariants_order`.
5. Every axis may have size 1: `public_bugs/test_accumulation` with exact values, `test_equivalence`.
6. A slow, late or reordered link changes time only: here, bit by bit.
8. Two models in one process do not see each other: here, bit by bit.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, clip_grad_norm_
from hp_plugin.core.layout import local_tensor
from tests.fsdp.comparison import Tolerance, assert_same_training
from tests.fsdp.public_bugs.slow_link import SlowLink, take_freed_memory
from tests.fsdp.public_bugs.towers import Tower, shard
from tests.fsdp.runs import train_on_mesh
from tests.fsdp.twins import assert_at_rest, make_mesh
from tests.fsdp.variants import Variant
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


# ---- 1: stock data parallelism ---------------------------------------------------------------------------------------

LONG = Tolerance(loss=2e-6, norm=2e-6, gradient=2e-5, weight=1e-5)


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)], ids=name)
def test_twelve_steps_equal_stock_data_parallelism(mesh: tuple[int, int], transport: str) -> None:
    ours, theirs = Variant(steps=12), Variant(backend="ddp", steps=12)
    records = train_on_mesh(mesh, [ours, theirs], transport)
    assert len(records[ours]) == mesh[0]
    for record in records[ours]:
        assert_same_training(record, records[theirs][0], LONG)


# ---- 6: the link changes time only -----------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    inter_reduce_dtype=torch.bfloat16,
    master_dtype=torch.float32,
)
BESIDE_GRAD = MixedPrecisionPolicy(reduce_dtype=torch.float64)
DEPTH, WIDTH = 4, 24


def gradients_by_step(mesh: DeviceMesh, mode: str, options: dict[str, Any]) -> list[Tensor]:
    """Local gradients after every backward of two steps of three micro-batches, and the weights of the end."""
    torch.manual_seed(5)
    model = shard(Tower(DEPTH, WIDTH), mesh, **options)
    take_freed_memory(list(model.layers), [256, 320, 640, 1280, WIDTH * WIDTH, 3 * WIDTH])
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(2):
        for index in range(3):
            model.set_requires_all_reduce(mode != "all_reduce_last" or index == 2)
            model(torch.randn(2, WIDTH, generator=generator)).backward()
            assert_at_rest(model)
            seen += [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).sub_(local_tensor(parameter.grad), alpha=0.1)
                parameter.grad = None
    return seen + [local_tensor(p).clone() for p in model.parameters()]


def with_and_without_a_slow_link(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    policies = (MixedPrecisionPolicy(), BF16, NARROW, BESIDE_GRAD)
    for policy, mode in itertools.product(policies, ("plain", "all_reduce_last")):
        for bucket_bytes, window in ((1, 1), (1, 2), (4096, 1)):
            options = {"mp_policy": policy, "bucket_bytes": bucket_bytes, "window": window}
            expected = gradients_by_step(mesh, mode, options)
            link = SlowLink(mesh.get_group("dp_replicate"), seed=dist.get_rank(), delay_s=0.004)
            with link:
                found = gradients_by_step(mesh, mode, options)
            assert link.submitted > 0
            assert len(found) == len(expected)
            for mine, reference in zip(found, expected):
                assert torch.equal(mine, reference), f"{mode}, {options}"


@pytest.mark.parametrize(
    "mesh", [(2, 2), *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ((2, 1), (4, 1)))], ids=name
)
def test_a_slow_late_or_reordered_link_changes_no_bit(mesh: tuple[int, int]) -> None:
    run_ranks(mesh[0] * mesh[1], with_and_without_a_slow_link, timeout=120.0, replicate=mesh[0], shard_size=mesh[1])


# ---- 8: two models ---------------------------------------------------------------------------------------------------

STEPS, MICRO_BATCHES = 2, 2


def training(mesh: DeviceMesh, *, seed: int, options: dict[str, Any], weights: list[Tensor]) -> Iterator[None]:
    """A training that pauses between any two things it does; leaves the local weights of the end in `weights`."""
    torch.manual_seed(seed)
    model = shard(Tower(DEPTH, WIDTH, checkpointing=options.pop("checkpointing", "none")), mesh, **options)
    optimizer = HyperAdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(STEPS):
        for index in range(MICRO_BATCHES):
            model.set_requires_all_reduce(index == MICRO_BATCHES - 1)
            loss = model(torch.randn(2, WIDTH, generator=generator))
            yield
            loss.backward()
            yield
        clip_grad_norm_(model.parameters(), 0.1)
        yield
        optimizer.step()
        optimizer.zero_grad()
        yield
    weights += [local_tensor(p).clone() for p in model.parameters()]


def two_models(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    kinds: list[dict[str, Any]] = [
        {"bucket_bytes": 1, "window": 1, "mp_policy": BF16},
        {"bucket_bytes": 4096, "prefetch": 0, "checkpointing": "non-reentrant", "mp_policy": BESIDE_GRAD},
    ]
    alone: list[list[Tensor]] = [[], []]
    for seed, (options, weights) in enumerate(zip(copy.deepcopy(kinds), alone)):
        for _ in training(mesh, seed=seed, options=options, weights=weights):
            pass
    for pattern in ((0, 1), (1, 0, 0, 1), (0, 0, 1)):
        together: list[list[Tensor]] = [[], []]
        runs = [
            training(mesh, seed=seed, options=options, weights=weights)
            for seed, (options, weights) in enumerate(zip(copy.deepcopy(kinds), together))
        ]
        ended: set[int] = set()
        for turn in itertools.cycle(pattern):
            if turn not in ended and next(runs[turn], "ended") == "ended":
                ended.add(turn)
            if len(ended) == 2:
                break
        for mine, expected in zip(together, alone):
            assert len(mine) == len(expected) > 0
            assert all(torch.equal(a, b) for a, b in zip(mine, expected)), f"turns {pattern}"


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=name)
def test_two_models_on_one_mesh_train_as_each_does_alone(mesh: tuple[int, int]) -> None:
    run_ranks(mesh[0] * mesh[1], two_models, replicate=mesh[0], shard_size=mesh[1])
