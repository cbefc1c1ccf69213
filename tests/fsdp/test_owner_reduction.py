"""Gradients that one replica alone wants: summed there, with half the bytes, and absent elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_plugin import HyperMuon, MixedPrecisionPolicy, UnsupportedError, clip_grad_norm_, fully_shard
from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.owner_reduction import OwnerReduction, Segment
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.layout import local_tensor
from hp_plugin.core.transport import set_gradient_owner
from tests.fsdp.twins import Model, full, losses, make_mesh, pair
from tests.support import init_gloo, run_ranks
from tests.support.releases import TORCH

MESHES = [(2, 1), (2, 2), (3, 1)]


def name(value: object) -> str:
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value)


def own(model: nn.Module, mesh: DeviceMesh) -> dict[str, int]:
    """Gives every matrix to a replica, in turn; returns the replica of each."""
    column = mesh.mesh[:, mesh.get_local_rank("dp_shard")].tolist()
    owners = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            owners[parameter_name] = len(owners) % len(column)
            set_gradient_owner(parameter, column[owners[parameter_name]])
    return owners


def assert_owned_gradients(plain: nn.Module, sharded: nn.Module, owners: dict[str, int], mesh: DeviceMesh) -> None:
    """The owner has its shard of the reference, others have nothing; what nobody owns is everywhere."""
    mine = mesh.get_local_rank("dp_replicate")
    for (parameter_name, expected), (_, found) in zip(
        plain.named_parameters(), sharded.named_parameters(), strict=True
    ):
        if owners.get(parameter_name, mine) != mine:
            assert found.grad is None, f"{parameter_name} has a gradient on replica {mine}"
            continue
        assert isinstance(found.grad, DTensor), f"{parameter_name} has no gradient"
        rows = local_tensor(found.grad).shape[0]
        start = mesh.get_local_rank("dp_shard") * -(-expected.shape[0] // mesh.size(1))
        assert expected.grad is not None
        torch.testing.assert_close(local_tensor(found.grad), expected.grad[start : start + rows], rtol=2e-5, atol=1e-6)


def owned_gradients(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    for options in ({}, {"reshard_after_forward": False}, {"bucket_bytes": 1}):
        plain, sharded = pair(mesh, **options)
        owners = own(sharded, mesh)
        for step in range(3):  # the gradients of the second and third are added to those before
            reference, loss = losses(plain, sharded, step)
            reference.backward()
            loss.backward()
            assert_owned_gradients(plain, sharded, owners, mesh)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(clip_grad_norm_(sharded.parameters(), 0.01), expected, rtol=2e-5, atol=0.0)
        assert_owned_gradients(plain, sharded, owners, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_the_owner_alone_has_the_sum(mesh: tuple[int, int], transport: str) -> None:
    run_ranks(mesh[0] * mesh[1], owned_gradients, replicate=mesh[0], shard=mesh[1])


def micro_batches(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    plain, sharded = pair(mesh)
    owners = own(sharded, mesh)
    for last in (False, False, True):
        sharded.set_requires_all_reduce(last)
        reference, loss = losses(plain, sharded, int(last))
        reference.backward()
        loss.backward()
    assert_owned_gradients(plain, sharded, owners, mesh)
    # Once the owners are forgotten, everyone gets everything again.
    for parameter in sharded.parameters():
        parameter.grad = None
        set_gradient_owner(parameter, None)
    plain.zero_grad()
    reference, loss = losses(plain, sharded, 5)
    reference.backward()
    loss.backward()
    assert_owned_gradients(plain, sharded, {}, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_micro_batches_cross_once(mesh: tuple[int, int], transport: str) -> None:
    run_ranks(mesh[0] * mesh[1], micro_batches, replicate=mesh[0], shard=mesh[1])


def counted_step(mesh: DeviceMesh, *, owned: bool) -> tuple[Counters, dict[str, int], dict[str, int]]:
    """What one backward counts, the elements of this rank's slots, and the owners, by parameter."""
    _, sharded = pair(mesh)
    unit = unit_of(sharded)
    assert unit is not None
    owners = own(sharded, mesh) if owned else {}
    losses(sharded, sharded, 0)[1].backward()
    slots = {
        parameter_name: -(-parameter.shape[0] // mesh.size(1)) * parameter.shape[1:].numel()
        for parameter_name, parameter in sharded.named_parameters()
    }
    return unit.root.counters, slots, owners


def bytes_of_a_step(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    plain, _, _ = counted_step(mesh, owned=False)
    found, slots, owners = counted_step(mesh, owned=True)
    every, owned = sum(slots.values()), sum(slots[each] for each in owners)
    mine = sum(slots[each] for each, owner in owners.items() if owner == mesh.get_local_rank("dp_replicate"))
    assert found.owner_reduction_bytes == 4 * owned
    assert found.all_reduce_bytes == 4 * (every - owned)
    assert found.owner_reductions >= 1
    # All of it is packed, and what this replica wants is unpacked.
    assert found.copied_bytes - plain.copied_bytes == 4 * every + 4 * (every - owned + mine)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_bytes_are_those_of_the_slots(mesh: tuple[int, int]) -> None:
    run_ranks(mesh[0] * mesh[1], bytes_of_a_step, replicate=mesh[0], shard=mesh[1])


def sums_in_rank_order(wire: str) -> None:
    init_gloo()
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    dtype = getattr(torch, wire)
    terms = [torch.randn(10, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    mine = terms[rank].clone()
    # Elements 0 to 3 belong to the last replica, 4 is a gap, 5 and 6 to all, 7 to 9 to the first.
    reduction = OwnerReduction([mine], [[Segment(0, 4, size - 1), Segment(5, 2, None), Segment(7, 3, 0)]], group, dtype)
    reduction.wait()
    reduction.wait()
    crossed = [term.to(dtype).float() for term in terms]
    total = crossed[0].clone()
    for term in crossed[1:]:
        total += term
    wanted = {0: slice(7, 10), size - 1: slice(0, 4)}
    for replica, where in wanted.items():
        expected = total[where] if rank == replica else terms[rank][where]
        assert torch.equal(mine[where], expected)
    torch.testing.assert_close(mine[5:7], total[5:7], rtol=1e-2 if wire == "bfloat16" else 1e-6, atol=1e-2)
    assert mine[4] == terms[rank][4]


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_in_the_order_of_replicas(size: int, wire: str) -> None:
    run_ranks(size, sums_in_rank_order, wire=wire)


# ---- with Muon -------------------------------------------------------------------------------------------------------


def trained(mesh: DeviceMesh, options: dict[str, Any], muon: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Weights after a few steps without clipping, and the bytes that crossed between replicas."""
    _, sharded = pair(mesh, **options)
    optimizer = HyperMuon(sharded, lr=0.02, exact=True, **muon)
    for step in range(4):
        for batch in range(2):
            sharded.set_requires_all_reduce(batch == 1)
            losses(sharded, sharded, 10 * step + batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    unit = unit_of(sharded)
    assert unit is not None
    return [full(parameter.detach()) for parameter in sharded.parameters()], unit.root.counters.all_reduce_bytes


def muon_everywhere(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    for options in ({}, half):
        expected, all_bytes = trained(mesh, options, {})
        for muon in ({"momentum_placement": "owner"}, {"momentum_placement": "owner", "gradients": "owner"}):
            found, crossed = trained(mesh, options, muon)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), (options, muon)
        assert crossed < 0.7 * all_bytes


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=name)
def test_muon_trains_to_the_same_bits(mesh: tuple[int, int], transport: str) -> None:
    run_ranks(mesh[0] * mesh[1], muon_everywhere, replicate=mesh[0], shard=mesh[1])


def refusals() -> None:
    mesh = make_mesh(2, 1)
    _, sharded = pair(mesh)
    optimizer = HyperMuon(sharded, momentum_placement="owner", gradients="owner")
    for _ in range(2):
        losses(sharded, sharded, 0)[1].backward()
        optimizer.step()
    added = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(Exception, match="call zero_grad"):
        optimizer.add_param_group({"params": [("added", added)], "algorithm": "muon"})
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [("added", added)], "algorithm": "muon"})


def refusals_of_another_engine() -> None:
    mesh = make_mesh(2, 1)
    from torch.distributed.fsdp import fully_shard as stock

    torch.manual_seed(7)
    model = Model()
    stock(model, mesh=mesh)
    optimizer = HyperMuon(model, momentum_placement="owner", gradients="owner")
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"hp_plugin\.fully_shard"):
        optimizer.step()


def test_what_cannot_be_done_is_refused() -> None:
    run_ranks(2, refusals)


@pytest.mark.skipif(TORCH < (2, 8), reason="FSDP2 averages on gloo with a reduction that gloo does not have")
def test_shards_of_another_engine_are_refused() -> None:
    run_ranks(2, refusals_of_another_engine)


def test_one_replica_has_nothing_to_save() -> None:
    run_ranks(2, one_replica)


def one_replica() -> None:
    init_gloo()
    torch.manual_seed(7)
    model = Model()
    fully_shard(model)
    optimizer = HyperMuon(model, momentum_placement="owner", gradients="owner")
    losses(model, model, 0)[1].backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
