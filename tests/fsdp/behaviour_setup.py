"""Rank functions of `test_unit_behaviour` on what a model is made of: modules, meshes, dims and dtypes of its units."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hp_plugin import MixedPrecisionPolicy, fully_shard
from tests.fsdp.twins import (
    Model,
    backward_and_compare,
    batch,
    full,
    losses,
    make_mesh,
    pair,
    shard_blocks,
)
from tests.support import init_gloo

Case = Callable[..., None]


def a_list_of_modules_is_one_unit(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    plain = Model()
    sharded = copy.deepcopy(plain)
    fully_shard([sharded.blocks[2], sharded.blocks[3]], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert len(sharded.fsdp_units()) == 2
    for step in range(2):
        backward_and_compare(plain, sharded, step)


def ignored_parameters_stay_plain(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    plain = Model()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh, ignored_params={sharded.first.weight})
    assert type(sharded.first.weight) is nn.Parameter
    reference, mine = losses(plain, sharded, 0)
    reference.backward()
    mine.backward()
    assert type(sharded.first.weight.grad) is Tensor


def a_one_dimensional_mesh_shards_over_all_ranks(replicate: int, shard: int) -> None:
    init_gloo()
    mesh = init_device_mesh("cpu", (replicate * shard,), mesh_dim_names=("dp_shard",))
    plain, sharded = pair(mesh)
    assert sharded.first.weight.placements == (Shard(0),)
    backward_and_compare(plain, sharded, 0)


def no_mesh_means_all_ranks_of_this_host(replicate: int, shard: int) -> None:
    init_gloo()
    torch.manual_seed(7)
    plain = Model()
    sharded = fully_shard(copy.deepcopy(plain))
    assert sharded.first.weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert tuple(sharded.first.weight.device_mesh.shape) == (1, replicate * shard)
    backward_and_compare(plain, sharded, 0)


def shards_on_any_dim(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    for step in range(2):
        backward_and_compare(plain, sharded, step)


def bf16_compute_updates_fp32_masters(replicate: int, shard: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    plain = Model().bfloat16()
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    assert all(p.dtype == torch.float32 for p in sharded.parameters())
    output = sharded(batch(0)[dist.get_rank()])
    assert output.dtype == torch.float32
    output.square().mean().backward()
    for parameter in sharded.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    mine = F.mse_loss(plain(batch(0)[dist.get_rank()].bfloat16()).float(), torch.zeros(6, 3))
    mine.backward()
    for expected, found in zip(plain.parameters(), sharded.parameters()):
        assert expected.grad is not None
        mean = expected.grad.float().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        torch.testing.assert_close(full(found.grad), mean, rtol=1e-5, atol=1e-6)


def a_bf16_model_without_masters_keeps_its_dtype(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    sharded = Model().bfloat16()
    shard_blocks(sharded, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for expected_wrappers in (14, 0):
        sharded.fsdp_counters().reset()
        sharded(batch(0)[dist.get_rank()].bfloat16()).float().square().mean().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in sharded.parameters())
        if expected_wrappers == 0:
            assert sharded.fsdp_counters().gradient_dtensors_built == 0
        sharded.zero_grad()


CASES: list[Case] = [
    a_list_of_modules_is_one_unit,
    ignored_parameters_stay_plain,
    a_one_dimensional_mesh_shards_over_all_ranks,
    no_mesh_means_all_ranks_of_this_host,
    shards_on_any_dim,
    bf16_compute_updates_fp32_masters,
    a_bf16_model_without_masters_keeps_its_dtype,
]
