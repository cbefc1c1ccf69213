"""Collectives of a unit, against sums formed in one process."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from hp_plugin.core.transport import C10dTransport, all_reduce_sum, lane_of
from hp_plugin.core.transport.messages import PendingOrderedSum
from tests.support import init_gloo, run_ranks

LENGTHS = [1, 7, 4096]


def operand_of(rank: int, length: int, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + length)
    return torch.randn(ranks * length, generator=generator).to(dtype)


def reduce_scatter_twice(dtype: torch.dtype) -> dict[str, bool]:
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transport = C10dTransport(dist.group.WORLD)
    inputs = [operand_of(rank, length, dtype, ranks) for length in LENGTHS]
    before = [operand.clone() for operand in inputs]
    rounds = []
    for _ in range(2):
        outputs = [torch.full((length,), float("nan"), dtype=dtype) for length in LENGTHS]
        pending = transport.reduce_scatter(outputs, inputs)
        pending.wait()
        pending.wait()
        rounds.append(outputs)
    exact = close = True
    for output, length in zip(rounds[0], LENGTHS):
        slices = [operand_of(r, length, dtype, ranks).view(ranks, length)[rank] for r in range(ranks)]
        wanted = sum(piece.double() for piece in slices)
        close &= torch.allclose(output.double(), wanted, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-2)
        exact &= ranks > 2 or torch.equal(output, slices[0] + slices[1])
    return {
        "close": close,
        "exact": exact,
        "repeated": all(torch.equal(a, b) for a, b in zip(*rounds)),
        "inputs untouched": all(torch.equal(a, b) for a, b in zip(before, inputs)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_reduce_scatter_sums_slices_in_one_order(ranks: int, dtype: torch.dtype) -> None:
    for found in run_ranks(ranks, reduce_scatter_twice, dtype=dtype):
        assert all(found.values()), found


def sums_in_rank_order(dtype: torch.dtype) -> bool:
    """The exchange for back ends that add up in an order of their own, against messages."""
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    inputs = [operand_of(rank, length, dtype, ranks) for length in LENGTHS]
    expected, found = ([torch.empty(length, dtype=dtype) for length in LENGTHS] for _ in range(2))
    C10dTransport(group).reduce_scatter(expected, inputs).wait()
    pending = PendingOrderedSum(found, inputs, group)
    pending.wait()
    pending.wait()
    return all(torch.equal(a, b) for a, b in zip(expected, found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_ordered_sum_has_the_bits_of_messages(dtype: torch.dtype) -> None:
    assert all(run_ranks(4, sums_in_rank_order, dtype=dtype))


def gather_in_place() -> bool:
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transport = C10dTransport(dist.group.WORLD)
    outputs = [torch.full((ranks * length,), -1.0) for length in LENGTHS]
    inputs = [output.view(ranks, -1)[rank] for output in outputs]
    for operand in inputs:
        operand.fill_(rank)
    transport.all_gather(lambda: (outputs, inputs)).wait()
    return all(
        torch.equal(output, torch.arange(ranks).float().repeat_interleave(length))
        for output, length in zip(outputs, LENGTHS)
    )


def test_all_gather_may_read_its_own_slice_of_the_output() -> None:
    assert all(run_ranks(2, gather_in_place))


def reduce_between() -> float:
    init_gloo()
    buffer = torch.full((3,), dist.get_rank() + 1.0)
    all_reduce_sum(buffer, dist.group.WORLD).wait()
    return float(buffer.sum())


def test_all_reduce_sums_in_place() -> None:
    assert run_ranks(2, reduce_between) == [9.0, 9.0]


def units_in_any_order() -> list[bool]:
    """Two units of one group, gathered and reduced in opposite orders on the two ranks."""
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    transports = [C10dTransport(group), C10dTransport(group)]
    order = [0, 1] if rank == 0 else [1, 0]
    full = [torch.full((2 * ranks,), float("nan")) for _ in transports]
    shards = [torch.full((2,), 10.0 * unit + rank) for unit in range(2)]
    sums = [torch.full((2,), float("nan")) for _ in transports]
    operands = [torch.arange(4.0) + 100 * unit + 1000 * rank for unit in range(2)]
    gathers = {u: transports[u].all_gather(lambda u=u: ([full[u]], [shards[u]])) for u in order}
    lanes = [lane_of(group, "cpu", role=f"test {unit}") for unit in range(2)]
    pending = [transports[unit].reduce_scatter([sums[unit]], [operands[unit]]) for unit in range(2)]
    tickets = [lanes[unit].submit(pending[unit].wait) for unit in order]
    for wait in [*(gathers[unit].wait for unit in reversed(order)), *(ticket.wait for ticket in tickets)]:
        wait()
    both = [(torch.arange(4.0) + 100 * unit) * 2 + 1000 for unit in range(2)]
    return [
        all(full[unit].tolist() == [10.0 * unit] * 2 + [10.0 * unit + 1] * 2 for unit in range(2)),
        all(torch.equal(sums[unit], both[unit].view(2, 2)[rank]) for unit in range(2)),
    ]


def test_units_of_a_group_may_be_issued_in_any_order_on_gloo() -> None:
    assert run_ranks(2, units_in_any_order) == [[True, True]] * 2


def gather_behind_a_job() -> list[str]:
    init_gloo()
    group = dist.group.WORLD
    assert group is not None
    transport = C10dTransport(group)
    happened: list[str] = []
    gate = threading.Event()

    def before() -> None:
        gate.wait(60.0)
        happened.append("job")

    def prepare() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        happened.append("prepared")
        return [torch.zeros(2)], [torch.ones(1)]

    ticket = lane_of(group, "cpu").submit(before)
    pending = transport.all_gather(prepare, after=ticket)
    happened.append("issued")
    gate.set()
    pending.wait()
    return [*happened, f"{pending.operand_bytes} bytes, {pending.copied_bytes} copied"]


def test_a_gather_is_prepared_behind_the_job_that_it_is_to_follow() -> None:
    assert run_ranks(2, gather_behind_a_job) == [["issued", "job", "prepared", "8 bytes, 4 copied"]] * 2
