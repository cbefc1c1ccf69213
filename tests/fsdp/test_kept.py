"""`reshard_after_forward` as a number: memory in closed form, gathers in small groups, values against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plugin import ConfigurationError, MixedPrecisionPolicy, fully_shard
from hp_plugin.core.fsdp.kept import normalized_reshard
from hp_plugin.core.fsdp.root import unit_of
from tests.fsdp.twins import (
    Model,
    assert_at_rest,
    assert_gradients_equal,
    backward_and_compare,
    batch,
    full,
    losses,
    make_mesh,
    pair,
    shard_blocks,
)
from tests.support import run_ranks
from tests.support.releases import TORCH


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


def bytes_left_by(run: Callable[[], object]) -> int:
    """Host memory that `run` allocates and does not free, as the allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()  # kept alive until all has been counted
    left = sum(event.self_cpu_memory_usage for event in profiler.events())
    del result
    return left


@pytest.mark.skipif(TORCH < (2, 8), reason="the profiler counts memory of backward only now and then")
def test_between_forward_and_backward_a_unit_takes_its_share_and_no_more(fake_group: None) -> None:
    """An integer once ran out of memory where False did not: pytorch #147179."""
    inputs = torch.randn(2, 5)
    mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
    left: dict[bool | int, int] = {}
    after: dict[bool | int, int] = {}
    for number in (True, 8, 4, 2, False):
        model = Model()
        shard_blocks(model, mesh, reshard_after_forward=True)
        for block in model.blocks:
            block.set_reshard_after_forward(number)  # type: ignore[operator]
        for _ in range(2):
            model(inputs).sum().backward()
        outputs: list[torch.Tensor] = []
        left[number] = bytes_left_by(lambda model=model, outputs=outputs: outputs.append(model(inputs)))
        after[number] = bytes_left_by(lambda outputs=outputs: outputs.pop().sum().backward())
    units = [unit_of(block) for block in model.blocks]
    whole = sum(u.full_bytes for u in units if u is not None)
    kept = {number: held - left[True] for number, held in left.items()}
    assert kept == {True: 0, 8: 0, 4: whole / 4, 2: whole / 2, False: whole}
    assert {number: left[number] + after[number] for number in left} == dict.fromkeys(left, left[True] + after[True])


def test_backward_gathers_in_the_small_group(fake_group: None) -> None:
    model = Model()
    mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
    shard_blocks(model, mesh, reshard_after_forward=2)
    unit = unit_of(model.blocks[0])
    assert unit is not None
    groups: list[list[int]] = []
    model(torch.randn(2, 5)).sum()
    small = unit.root.small_transport(unit.info, 2)
    gather = small.all_gather

    def counting(*args: Any, **kwargs: Any) -> object:
        groups.append(dist.get_process_group_ranks(small.group))
        return gather(*args, **kwargs)

    small.all_gather = counting  # type: ignore[method-assign, assignment]
    model.fsdp_counters().reset()
    model(torch.randn(2, 5)).sum().backward()
    assert groups == [[2, 3]] * 5, "four blocks and the root"
    assert model.fsdp_counters().all_gathers == 10


@pytest.mark.parametrize(
    ("value", "meant"), [(None, None), (True, True), (False, False), (1, False), (6, True), (3, 3)]
)
def test_numbers_that_mean_all_or_nothing_become_booleans(value: bool | int | None, meant: bool | int | None) -> None:
    assert normalized_reshard(value, 6) is meant or normalized_reshard(value, 6) == meant == 3


@pytest.mark.parametrize("value", [0, -2, 4, 12, 2.0, "2"])
def test_other_values_are_refused_with_the_divisors(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"divides the 6 of the shard group \(1, 2, 3, 6\)"):
        normalized_reshard(value, 6)  # type: ignore[arg-type]


# ---- values ---------------------------------------------------------------------------------------------------------


def values(rank_dim: str) -> None:
    mesh = make_mesh(1, 4)
    placement = {"rows": None, "columns": lambda p: Shard(p.ndim - 1)}[rank_dim]
    for kind in ("none", "reentrant", "non-reentrant", "pairs"):
        plain, sharded = pair(mesh, reshard_after_forward=2, shard_placement_fn=placement)
        sharded.checkpointing = kind
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
        for step in range(3):
            backward_and_compare(plain, sharded, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def several_forwards(kind: str) -> None:
    plain, sharded = pair(make_mesh(1, 4), reshard_after_forward=2)
    sharded.checkpointing = kind
    for _ in range(2):
        pending = [losses(plain, sharded, step) for step in range(3)]
        for reference, mine in pending:
            reference.backward()
            mine.backward()
        assert_gradients_equal(plain, sharded)
        assert_at_rest(sharded)


def weights_that_change_without_a_backward() -> None:
    plain, sharded = pair(make_mesh(1, 4), reshard_after_forward=2)
    losses(plain, sharded, 0)  # kept, and never used
    for model in (plain, sharded):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    backward_and_compare(plain, sharded, 1)
    with torch.no_grad():
        torch.testing.assert_close(sharded(batch(9)[0]), plain(batch(9)[0]), rtol=1e-4, atol=1e-5)


def a_setting_that_changes() -> None:
    plain, sharded = pair(make_mesh(1, 4))
    for step, value in enumerate((True, 2, False, 2, 4, 1)):
        sharded.set_reshard_after_forward(value)
        backward_and_compare(plain, sharded, step)


def bf16_compute() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = make_mesh(1, 4)
    torch.manual_seed(7)
    first = Model()
    found = []
    for value in (True, 2):
        model = copy.deepcopy(first)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=value)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for step in range(2):
            model(batch(step)[dist.get_rank()]).float().square().mean().backward()
        found.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 24
    for expected, gradient in zip(*found):
        assert torch.equal(expected, gradient), "the same bits travel, only in other groups"


@pytest.mark.parametrize("rank_dim", ["rows", "columns"])
def test_gradients_are_those_of_plain_pytorch(rank_dim: str, transport: str) -> None:
    run_ranks(4, values, rank_dim=rank_dim)


@pytest.mark.parametrize("kind", ["none", "reentrant"])
def test_several_forwards_share_what_is_kept(kind: str, transport: str) -> None:
    run_ranks(4, several_forwards, kind=kind)


def test_what_is_kept_is_never_used_for_another_forward(transport: str) -> None:
    run_ranks(4, weights_that_change_without_a_backward)


def test_the_setting_may_change_between_steps(transport: str) -> None:
    run_ranks(4, a_setting_that_changes)


def test_bf16_parts_hold_the_same_bits(transport: str) -> None:
    run_ranks(4, bf16_compute)
