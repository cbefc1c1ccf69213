"""Bytes counted on real groups equal the closed forms of the model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_plugin.core.topology import Topology, Traffic, TrafficRecorder
from tests.support import init_gloo, run_ranks

N = 4
B = 480  # bytes of the full fp32 tensor: 120 elements


def full() -> torch.Tensor:
    return torch.ones(B // 4)


def part() -> torch.Tensor:
    return torch.ones(B // 4 // N)


def coalesced_all_gather() -> None:
    outputs, inputs = [full(), full()], [part(), part()]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()


def coalesced_reduce_scatter() -> None:
    dist.group.WORLD.reduce_scatter_tensor_coalesced([part(), part()], [full(), full()]).wait()


def coalesced_all_reduce() -> None:
    options = dist.AllreduceCoalescedOptions()
    dist.group.WORLD.allreduce_coalesced([full(), full()], options).wait()


def send_to_next() -> None:
    rank = dist.get_rank()
    received = full()
    work = dist.isend(full(), (rank + 1) % N)
    dist.recv(received, (rank - 1) % N)
    work.wait()


def functional_all_gather() -> None:
    funcol.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(part(), N, dist.group.WORLD.group_name))


def functional_reduce_scatter() -> None:
    name = dist.group.WORLD.group_name
    funcol.wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(full(), "sum", N, name))


def functional_all_to_all() -> None:
    name = dist.group.WORLD.group_name
    funcol.wait_tensor(torch.ops._c10d_functional.all_to_all_single(full(), [30] * N, [30] * N, name))


def uneven_all_to_all() -> None:
    """Every rank sends 60 of its 120 elements to rank 0 and 20 to each other rank."""
    rank, splits = dist.get_rank(), [60, 20, 20, 20]
    received = [splits[rank]] * N
    dist.all_to_all_single(torch.empty(sum(received)), full(), received, splits)


# name -> (call on each rank, (intra, inter) bytes over all ranks). In the ring 0 -> 1 -> 2 -> 3 -> 0 with supernodes
# (0, 1) and (2, 3), two edges are inside and two between, so both tiers carry half of every ring total.
RING_EDGES = 2
CASES: dict[str, tuple[Callable[[], object], float, float, str]] = {
    "all_reduce": (lambda: dist.all_reduce(full()), *([RING_EDGES * 2 * (N - 1) / N * B] * 2), "all_reduce"),
    "all_reduce_coalesced": (coalesced_all_reduce, *([RING_EDGES * 4 * (N - 1) / N * B] * 2), "all_reduce"),
    "functional all_reduce": (
        lambda: funcol.wait_tensor(funcol.all_reduce(full(), "sum", dist.group.WORLD)),
        *([RING_EDGES * 2 * (N - 1) / N * B] * 2),
        "all_reduce",
    ),
    "all_gather": (
        lambda: dist.group.WORLD._allgather_base(full(), part()).wait(),
        *([RING_EDGES * (N - 1) / N * B] * 2),
        "all_gather",
    ),
    "all_gather list": (
        lambda: dist.all_gather([part() for _ in range(N)], part()),
        *([RING_EDGES * (N - 1) / N * B] * 2),
        "all_gather",
    ),
    "all_gather coalesced": (coalesced_all_gather, *([RING_EDGES * 2 * (N - 1) / N * B] * 2), "all_gather"),
    "functional all_gather": (functional_all_gather, *([RING_EDGES * (N - 1) / N * B] * 2), "all_gather"),
    "reduce_scatter": (
        lambda: dist.group.WORLD._reduce_scatter_base(part(), full()).wait(),
        *([RING_EDGES * (N - 1) / N * B] * 2),
        "reduce_scatter",
    ),
    "reduce_scatter coalesced": (
        coalesced_reduce_scatter,
        *([RING_EDGES * 2 * (N - 1) / N * B] * 2),
        "reduce_scatter",
    ),
    "functional reduce_scatter": (functional_reduce_scatter, *([RING_EDGES * (N - 1) / N * B] * 2), "reduce_scatter"),
    # The source's predecessor sends nothing: of the ring, edges 0-1 and 2-3 (inside) and 1-2 (between) carry B.
    "broadcast from 0": (lambda: dist.broadcast(full(), 0), 2 * B, B, "broadcast"),
    "broadcast from 1": (lambda: dist.broadcast(full(), 1), B, 2 * B, "broadcast"),
    # The root sends nothing: edges 2-3 (inside), 1-2 and 3-0 (between) carry B.
    "reduce to 0": (lambda: dist.reduce(full(), 0), B, 2 * B, "reduce"),
    # Every rank sends a quarter to its neighbour inside and two quarters to the other supernode.
    "all_to_all single": (lambda: dist.all_to_all_single(full(), full()), N * B / 4, N * B / 2, "all_to_all"),
    "functional all_to_all": (functional_all_to_all, N * B / 4, N * B / 2, "all_to_all"),
    # Inside: 1 -> 0 carries 60 elements, 0 -> 1, 2 -> 3 and 3 -> 2 carry 20. Between: 2 and 3 send 60 and 20 each,
    # 0 and 1 send 20 and 20 each.
    "all_to_all uneven": (uneven_all_to_all, 4 * 120, 4 * (2 * 80 + 2 * 40), "all_to_all"),
    "send": (send_to_next, 2 * B, 2 * B, "send"),
    "barrier": (dist.barrier, 0, 0, "barrier"),
}


def count_all() -> dict[str, Traffic]:
    init_gloo()
    found = {}
    for name, (call, *_) in CASES.items():
        with TrafficRecorder(Topology.from_supernode_size(N, 2)) as recorder:
            call()
        found[name] = recorder.traffic
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def counted() -> list[dict[str, Traffic]]:
    return run_ranks(N, count_all)


@pytest.mark.parametrize("case", CASES)
def test_totals_over_ranks_equal_the_closed_form(counted: list[dict[str, Traffic]], case: str) -> None:
    _, intra, inter, operation = CASES[case]
    total = sum((found[case] for found in counted), Traffic())
    assert (total.intra_bytes, total.inter_bytes) == (intra, inter)
    assert total.calls[operation] == N
    assert not total.unmodelled


def count_submeshes() -> tuple[Traffic, Traffic, Traffic]:
    """A sharded step by hand: gather and reduce-scatter inside, all-reduce of the shard between."""
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    topology = Topology.from_supernode_size(4, 2)
    inside, between = mesh.get_group("dp_shard"), mesh.get_group("dp_replicate")
    with TrafficRecorder(topology) as recorder:
        inside._allgather_base(torch.ones(120), torch.ones(60)).wait()
        gathered = recorder.traffic
        inside._reduce_scatter_base(torch.ones(60), torch.ones(120)).wait()
        dist.all_reduce(torch.ones(60), group=between)
        stepped = recorder.traffic
        recorder.reset()
        tensor = distribute_tensor(torch.ones(8), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        recorder.reset()
        tensor.full_tensor()
    return gathered, stepped, recorder.traffic


def test_group_positions_are_translated_to_global_ranks() -> None:
    for gathered, stepped, dtensor in run_ranks(4, count_submeshes):
        assert (gathered.intra_bytes, gathered.inter_bytes) == (B / 2, 0)
        assert (stepped.intra_bytes, stepped.inter_bytes) == (B, B / 2)
        assert stepped.calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
        assert (dtensor.intra_bytes, dtensor.inter_bytes) == (16, 0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def count_backward() -> Traffic:
    init_gloo()
    value = torch.ones(8, requires_grad=True)
    with TrafficRecorder(Topology.from_supernode_size(2, 1)) as recorder:
        Doubled.apply(value).sum().backward()
    return recorder.traffic


def test_collectives_in_backward_are_seen() -> None:
    for found in run_ranks(2, count_backward):
        assert found.calls == {"all_reduce": 1}
        assert (found.intra_bytes, found.inter_bytes) == (0, 32)


def count_single() -> Traffic:
    init_gloo()
    with TrafficRecorder(Topology.from_supernode_size(1, 1)) as recorder:
        dist.all_reduce(full())
        dist.broadcast(full(), 0)
        dist.all_to_all_single(full(), full())
    return recorder.traffic


def test_a_group_of_one_sends_nothing() -> None:
    [found] = run_ranks(1, count_single)
    assert (found.intra_bytes, found.inter_bytes) == (0, 0)
    assert found.calls == {"all_reduce": 1, "broadcast": 1, "all_to_all": 1}


def test_traffic_adds_up() -> None:
    total = Traffic(1, 2, {"a": 1}) + Traffic(10, 20, {"a": 2, "b": 1}, {"x": 1})
    assert total == Traffic(11, 22, {"a": 3, "b": 1}, {"x": 1})


def count_odd_sizes() -> Traffic:
    init_gloo()
    with TrafficRecorder(Topology.from_supernode_size(3, 3)) as recorder:
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    return recorder.traffic


def test_fractions_are_rounded_once_and_not_per_call() -> None:
    assert [found.intra_bytes for found in run_ranks(3, count_odd_sizes)] == [math.floor(3 * 2 * 2 / 3 * 4)] * 3
