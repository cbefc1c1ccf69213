"""Shards that are slices of shared parameters: the same training, one copy of the weights, and no unannounced write."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, UnsupportedError, clip_grad_norm_
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.errors import HyperParallelError
from tests.fsdp.twins import backward_and_compare, batch, full, losses, make_mesh, pair
from tests.support import run_ranks

MESHES = [(1, 2), (2, 2), (1, 4)]


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


def aliased_pair(mesh: DeviceMesh, **options: Any) -> tuple[Any, Any]:
    return pair(mesh, transport="shm", residence="aliased", **options)


def training(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    for options in ({}, {"reshard_after_forward": False, "prefetch": 0}):
        plain, sharded = aliased_pair(mesh, **options)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
        ours = HyperAdamW(sharded.parameters(), lr=1e-2, eps=1e-4)
        for step in range(3):
            backward_and_compare(plain, sharded, step)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            clip_grad_norm_(sharded.parameters(), 0.05)
            if dist.get_rank() == 0:
                time.sleep(0.05)  # the others are to step while this rank still has its part of backward before it
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        for expected, weight in zip(plain.parameters(), sharded.parameters()):
            torch.testing.assert_close(full(weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_training_equals_plain_pytorch(mesh: tuple[int, int]) -> None:
    run_ranks(mesh[0] * mesh[1], training, replicate=mesh[0], shard=mesh[1])


def what_is_copied(*, replicate: int, shard: int) -> list[bool]:
    """Whether a forward copies nothing, and whether every shard lies in the full parameter."""
    _, sharded = aliased_pair(make_mesh(replicate, shard))
    with torch.no_grad():
        sharded(batch(0)[0])
        sharded.fsdp_counters().reset()
        sharded(batch(0)[0])
    found = [sharded.fsdp_counters().copied_bytes == 0]
    for module in sharded.modules():
        unit = unit_of(module)
        for p in unit.parameters if unit is not None else []:
            assert p.full is not None
            if p.local.numel():
                start = p.full.data_ptr() + p.slot.offset(p.info.shard_rank) * p.full.stride(0) * p.full.itemsize
                found.append(p.local.data_ptr() == start)
    assert {each["residence"] for each in sharded.fsdp_units()} == {"aliased"}
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_a_shard_is_a_slice_and_a_forward_copies_nothing(mesh: tuple[int, int]) -> None:
    for found in run_ranks(mesh[0] * mesh[1], what_is_copied, replicate=mesh[0], shard=mesh[1]):
        assert len(found) > 10
        assert all(found)


def step_beside_a_slow_rank(*, replicate: int, shard: int) -> float:
    """Deviation of a forward that sleeps while the other ranks, done with theirs, write their shards."""
    plain, sharded = aliased_pair(make_mesh(replicate, shard))
    slow = dist.get_rank() == dist.get_world_size() - 1
    optimizer = HyperAdamW(sharded.parameters(), lr=0.5)
    backward_and_compare(plain, sharded, 0)
    if slow:
        sharded.blocks[2].up.register_forward_pre_hook(lambda *_: time.sleep(0.5))
    with torch.no_grad():
        found, expected = sharded(batch(1)[0]), plain(batch(1)[0])
    optimizer.step()
    return float((found - expected).abs().max())


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=name)
def test_a_step_waits_until_every_rank_has_read(mesh: tuple[int, int]) -> None:
    for deviation in run_ranks(mesh[0] * mesh[1], step_beside_a_slow_rank, replicate=mesh[0], shard=mesh[1]):
        assert deviation < 1e-5


def unannounced_steps() -> list[str]:
    said = []
    mesh = make_mesh(1, 2)
    _, sharded = aliased_pair(mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(batch(0)[0]).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedError) as refusal:
        sharded(batch(0)[0])
    said.append(str(refusal.value))
    dist.barrier()

    plain, sharded = aliased_pair(mesh)
    hyper = HyperAdamW(sharded.parameters())
    backward_and_compare(plain, sharded, 0)
    losses(plain, sharded, 1)  # the root keeps its parameters for a backward that does not come
    with pytest.raises(HyperParallelError) as early:
        hyper.step()
    said.append(str(early.value))
    return said


def test_a_write_that_nobody_announced_is_refused() -> None:
    for foreign, early in run_ranks(2, unannounced_steps):
        assert "did not announce it" in foreign
        assert "HyperAdamW" in foreign
        assert "unsharded while its parameters are about to be written" in early


def loading() -> None:
    """Weights that are loaded, by every way there is, are those that the next forward uses."""
    mesh = make_mesh(1, 2)
    for assign in (False, True):
        plain, sharded = aliased_pair(mesh)
        backward_and_compare(plain, sharded, 0)
        other, source = pair(mesh, transport="c10d")
        with torch.no_grad():
            for parameter in (*other.parameters(), *source.parameters()):
                parameter.add_(0.125)
        sharded.load_state_dict({k: v.detach().clone() for k, v in source.state_dict().items()}, assign=assign)
        sharded.zero_grad()
        backward_and_compare(other, sharded, 1)
        HyperAdamW(sharded.parameters()).step()
        sharded(batch(2)[0]).sum().backward()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    state = get_model_state_dict(source, options=options)
    set_model_state_dict(sharded, state, options=options)
    loaded = get_model_state_dict(sharded, options=options)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(full(value), full(state[key])) for key, value in loaded.items())


def test_loaded_weights_are_used() -> None:
    run_ranks(2, loading)


def refusals() -> list[str]:
    said = []
    mesh = make_mesh(1, 2)
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        {"transport": "c10d"},
    ):
        options = {"transport": "shm", "residence": "aliased"} | options
        _, sharded = pair(mesh, **options)
        with pytest.raises(UnsupportedError) as refusal:
            sharded(batch(0)[0])
        said.append(str(refusal.value))
    return said


def test_what_cannot_be_aliased_is_refused_by_name() -> None:
    for dtype, dim, transport in run_ranks(2, refusals):
        assert "computed with in torch.bfloat16 and kept in torch.float32" in dtype
        assert "is sharded on dim 1" in dim
        assert "needs shared memory" in transport
        assert all('residence="private"' in sentence for sentence in (dtype, dim, transport))
