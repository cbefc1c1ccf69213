"""Operands against plain slicing, with every rank of the shard group played in turn by one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.operand import PACK_BYTES, Operand, Pack, Single, group_operands
from hp_plugin.core.fsdp.parameter import MeshInfo, ShardedParameter

Spec = tuple[tuple[int, ...], int]  # shape and sharded dim
AWKWARD: list[Spec] = [((8, 3), 0), ((5,), 0), ((1,), 0), ((3, 7), 1), ((2, 4, 3), 1), ((7, 2), 0)]


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_of(
    size: int,
    specs: list[Spec],
    *,
    compute: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[list[ShardedParameter]]]:
    """Full tensors, and the parameters made of them on every rank of a shard group of `size`."""
    generator = torch.Generator().manual_seed(3)
    fulls = [torch.randn(shape, generator=generator) for shape, _ in specs]
    by_rank = []
    for rank in range(size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        info = MeshInfo.resolve(init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",)))
        parameters = []
        for index, (full, (_, dim)) in enumerate(zip(fulls, specs)):
            owner = nn.Module()
            owner.weight = nn.Parameter(full.clone())
            parameters.append(
                ShardedParameter(
                    owner.weight,
                    [(owner, "weight")],
                    info=info,
                    dim=dim,
                    compute_dtype=compute,
                    master_dtype=master,
                    name=f"p{index}",
                )
            )
        by_rank.append(parameters)
    return fulls, by_rank


@torch.no_grad()
def gather(by_rank: list[list[Operand]], counters: Counters) -> None:
    """What an all-gather among the ranks does, for every operand."""
    for operands in zip(*by_rank):
        calls = [operand.begin_gather(counters) for operand in operands]
        if calls[0] is not None:
            everything = torch.cat([call[1] for call in calls if call is not None])
            for call in calls:
                assert call is not None
                assert call[0].numel() == len(operands) * operands[0].slot_numel
                call[0].copy_(everything)
        for operand in operands:
            operand.finish_gather(counters)


@settings(deadline=None, max_examples=60)
@given(
    specs=st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).flatmap(
            lambda shape: st.tuples(st.just(tuple(shape)), st.integers(0, len(shape) - 1))
        ),
        min_size=1,
        max_size=4,
    ),
    size=st.integers(1, 5),
    compute=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_gathered_parameters_equal_those_that_were_sharded(specs: list[Spec], size: int, compute: torch.dtype) -> None:
    fulls, by_rank = ranks_of(size, specs, compute=compute)
    operands = [group_operands(parameters) for parameters in by_rank]
    for _ in range(2):
        counters = Counters()
        gather(operands, counters)
        for parameters in by_rank:
            for full, parameter in zip(fulls, parameters):
                installed = parameter.owners[0][0]._parameters["weight"]
                assert installed is not parameter.sharded
                assert installed is not None and torch.equal(installed, full.to(compute))
        # Otherwise autograd would take a refilled tensor for a modified one.
        assert all(p.owners[0][0].weight._version == 0 for parameters in by_rank for p in parameters)
        for operand in (o for group in operands for o in group):
            operand.release_full()
        assert all(p.owners[0][0].weight is p.sharded for parameters in by_rank for p in parameters)
        assert not any(p.full_is_alive for parameters in by_rank for p in parameters)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dims", ["rows", "any"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_reduction_operands_are_the_slots_of_all_ranks(
    size: int, reduce_dtype: torch.dtype, dims: str, is_complete: bool
) -> None:
    specs = AWKWARD if dims == "any" else [(shape, 0) for shape, _ in AWKWARD]
    fulls, by_rank = ranks_of(size, specs)
    gradients: list[torch.Tensor | None] = [full + 1 for full in fulls]
    if not is_complete:
        gradients[1] = None
    gradients[0] = gradients[0].t().contiguous().t()  # type: ignore[union-attr]
    (pack,) = group_operands(by_rank[0])
    operand = pack.reduction_operand(gradients, reduce_dtype, Counters())
    assert operand.shape == (size * pack.slot_numel,)
    assert operand.dtype == reduce_dtype
    slots = operand.view(size, -1)
    for parameter, offset, gradient in zip(pack.parameters, pack.slot_offsets, gradients):
        slot = parameter.slot
        for rank in range(size):
            mine = slots[rank, offset : offset + slot.slot_numel].view(slot.slot_shape)
            mine = mine.narrow(slot.dim, 0, slot.length(rank))
            if gradient is None:
                assert not slots[rank, offset : offset + slot.slot_numel].any()
            else:
                assert torch.equal(
                    mine, gradient.narrow(slot.dim, slot.offset(rank), slot.length(rank)).to(reduce_dtype)
                )
    assert torch.isfinite(operand).all(), "padding travels and must be zero"


def test_only_tiny_parameters_of_one_dtype_share_a_pack() -> None:
    columns = PACK_BYTES // 4 // 2
    specs: list[Spec] = [((2, columns), 0), ((4,), 0), ((2, columns - 1), 0), ((1, columns), 0)]
    _, (parameters, _) = ranks_of(2, specs)
    groups = group_operands(parameters)
    # The last one is padded to two rows, and so is not tiny.
    assert [[p.name for p in o.parameters] for o in groups] == [["p0"], ["p1", "p2"], ["p3"]]
    assert [type(o) for o in groups] == [Single, Pack, Single]
    parameters[1].compute_dtype = torch.float64
    assert [[p.name for p in o.parameters] for o in group_operands(parameters)] == [["p0"], ["p1"], ["p2"], ["p3"]]


def test_nothing_is_packed_where_nothing_travels() -> None:
    _, (parameters,) = ranks_of(1, AWKWARD)
    assert all(isinstance(o, Single) and o.full_bytes == 0 for o in group_operands(parameters))


def test_an_even_parameter_of_its_own_is_gathered_and_reduced_without_a_copy() -> None:
    rows = PACK_BYTES // 4
    fulls, by_rank = ranks_of(2, [((rows, 2), 0)])
    operands = [group_operands(parameters) for parameters in by_rank]
    counters = Counters()
    gather(operands, counters)
    gradient = fulls[0] + 1
    operand = operands[0][0].reduction_operand([gradient], torch.float32, counters)
    assert operand.data_ptr() == gradient.data_ptr()
    assert counters.copied_bytes == 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gradient_whose_own_slot_can_be_added_as_it_is_is_written_for_the_peers_alone(size: int) -> None:
    rows = PACK_BYTES // 4 * size
    fulls, by_rank = ranks_of(size, [((rows, 2), 0)])
    gradient = fulls[0] + 1
    slots = gradient.view(size, -1)
    for rank, parameters in enumerate(by_rank):
        (operand,) = group_operands(parameters)
        counters, out = Counters(), torch.full((gradient.numel(),), -7.0)
        own = operand.write_for_peers([gradient], torch.float32, counters, out=out)
        assert own.data_ptr() == slots[rank].data_ptr()
        assert own.shape == (operand.slot_numel,)
        written = out.view(size, -1)
        assert (written[rank] == -7.0).all(), "nobody reads it"
        others = [other for other in range(size) if other != rank]
        assert torch.equal(written[others], slots[others])
        assert counters.copied_bytes == 4 * slots[others].numel()


_EVEN, _UNEVEN = ((PACK_BYTES // 4, 6), 0), ((PACK_BYTES // 4 + 1, 6), 0)


@pytest.mark.parametrize("kind", ["cast", "uneven", "inner dim", "strided", "missing", "pack"])
def test_other_gradients_are_written_whole_with_the_own_slot_among_them(kind: str) -> None:
    specs = {"uneven": [_UNEVEN], "inner dim": [(_EVEN[0], 1)], "pack": [((4, 2), 0), ((8,), 0)]}.get(kind, [_EVEN])
    dtype = torch.float64 if kind == "cast" else torch.float32
    fulls, by_rank = ranks_of(2, specs)
    gradients: list[torch.Tensor | None] = [full + 1 for full in fulls]
    if kind == "strided":
        gradients = [(fulls[0] + 1).t().contiguous().t()]
    elif kind == "missing":
        gradients = [None]
    for rank, parameters in enumerate(by_rank):
        (operand,) = group_operands(parameters)
        wanted = operand.reduction_operand(gradients, dtype, Counters()).view(2, -1)
        out = torch.full((wanted.numel(),), -7.0, dtype=dtype)
        with torch.no_grad():
            own = operand.write_for_peers(gradients, dtype, Counters(), out=out)
        assert torch.equal(out.view(2, -1), wanted)
        assert own.data_ptr() == out.view(2, -1)[rank].data_ptr()
        assert torch.equal(own, wanted[rank])


def test_a_pack_counts_its_copies() -> None:
    fulls, by_rank = ranks_of(2, AWKWARD, compute=torch.bfloat16)
    (pack,) = group_operands(by_rank[1])
    counters = Counters()
    with torch.no_grad():
        pack.begin_gather(counters)
        pack.finish_gather(counters)
    shards = sum(p.local.numel() for p in by_rank[1])
    assert counters.copied_bytes == 2 * (shards + sum(f.numel() for f in fulls))


def test_a_gather_that_is_dropped_leaves_nothing_alive() -> None:
    _, by_rank = ranks_of(2, AWKWARD)
    (pack,) = group_operands(by_rank[0])
    with torch.no_grad():
        call = pack.begin_gather(Counters())
    assert call is not None
    pack.release_full()
    assert call[0].untyped_storage().size() == 0
    assert not any(p.full_is_alive for p in by_rank[0])
