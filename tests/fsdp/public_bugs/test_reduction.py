"""Reductions over both tiers: what is reduced, when, in which dtype, and with which operation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_plugin import MixedPrecisionPolicy
from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from hp_plugin.core.layout import local_tensor
from tests.fsdp.public_bugs.slow_link import Gate, SlowLink, gated_sums, take_freed_memory
from tests.fsdp.public_bugs.sum_only import SUM_ONLY, SumOnlyError, register_sum_only_backend
from tests.fsdp.public_bugs.towers import Taps, Tower, shard
from tests.fsdp.twins import assert_at_rest, assert_gradients_equal, full, losses, make_mesh, pair
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")
MESHES = [(2, 1), (2, 2)]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
# The gradient is wanted in another dtype than that of the reduction, so every bucket needs a buffer beside `.grad`.
BESIDE_GRAD = MixedPrecisionPolicy(reduce_dtype=torch.float64)


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


# ---- a link that is slow ---------------------------------------------------------------------------------------------


def gradients_over_a_slow_link(*, replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    link = mesh.get_group("dp_replicate")
    reordered = False
    for bucket_bytes, window in itertools.product((1, 4096), (1, 2)):
        plain, sharded = pair(mesh, bucket_bytes=bucket_bytes, window=window)
        sizes = [p.numel() for p in plain.blocks[0].parameters()] + [256, 512, 1024]
        take_freed_memory(list(sharded.blocks), sizes)
        with SlowLink(link, seed=dist.get_rank()) as slow:
            for step in range(3):  # from the second on into buffers beside the gradients that exist
                reference, mine = losses(plain, sharded, step)
                reference.backward()
                mine.backward()
                assert_gradients_equal(plain, sharded)
                assert_at_rest(sharded)
        assert slow.submitted > 0
        reordered |= slow.landings != sorted(slow.landings)
    assert reordered, "the link kept the order all the time"


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_slow_link_no_alias(mesh: tuple[int, int]) -> None:
    """Pytorch PRs #180889, #180900 (issue #140044): with a slow all-reduce and a busy allocator, every layer's gradient
    became that of the last layer, because the buffer under reduction was dropped and reused.
    """
    run_ranks(mesh[0] * mesh[1], gradients_over_a_slow_link, replicate=mesh[0], shard=mesh[1])


DEPTH = 6


def backward_behind_closed_gates(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    rank = dist.get_rank()
    cases: list[tuple[dict[str, Any], float, bool]] = [
        ({}, 5.0, False),  # reduced in what becomes .grad: no buffer is ever missing
        ({"mp_policy": BESIDE_GRAD, "window": 16}, 5.0, False),  # room for all
        ({"mp_policy": BESIDE_GRAD, "window": 1}, 0.2, True),  # the control: here backward must wait
    ]
    for options, patience_s, must_wait in cases[: 3 if replicate > 1 else 2]:
        model = shard(Tower(DEPTH, 24), mesh, bucket_bytes=1, **options)
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        model(inputs).backward()  # plans the reductions
        model.zero_grad()
        model.fsdp_counters().reset()
        # The gradient of the first layer's input is the last thing that backward computes: the link opens there. The
        # reduce-scatter of a layer ends when the layer before it has computed its gradients.
        link_gate = Gate(patience_s)
        inputs.register_hook(link_gate.open)
        gates = [Gate(patience_s) for _ in range(DEPTH + 1)]  # of the layers from the last to the first, and the root
        for gate, layer in zip(gates, [*reversed(model.layers)][1:]):
            layer.norm.register_forward_hook(lambda _m, _args, out, gate=gate: out.register_hook(gate.open) and None)
        for gate in gates[DEPTH - 1 :]:
            gate.open()  # nothing is computed after the first layer
        link = mesh.get_group("dp_replicate") if replicate > 1 else None
        with SlowLink(link, delay_s=0.0, reorder=False, gate=link_gate), gated_sums(gates) as received:
            model(inputs).backward()
        assert len(received) == (DEPTH + 1 if shard_size > 1 else 0)
        assert sum(gate.forced for gate in gates) == 0, f"{options}: waited for the reduce-scatter of the layer itself"
        waits = model.fsdp_counters().waits
        assert waits["end_of_backward"].count > 0
        if must_wait:
            assert link_gate.forced > 0, "a window of one bucket and a closed link must stop backward"
            assert waits["window"].count > 0
        else:
            assert link_gate.forced == 0, f"{options}: backward waited for the link before it had computed everything"
            assert waits["window"].count == 0
        assert_at_rest(model)


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=name)
def test_no_compute_wait_on_reduce(mesh: tuple[int, int]) -> None:
    """PyTorch PR #186000: before each layer's gradients could be copied, compute waited for the reduce-scatter of the
    layer before, 37.6 ms of every step. Here no reduction between supernodes completes before backward has computed
    its last gradient, and no reduce-scatter before the next layer has computed its own: who waits finds a closed gate.
    """
    run_ranks(mesh[0] * mesh[1], backward_behind_closed_gates, replicate=mesh[0], shard_size=mesh[1])


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def reduced(model: Taps, values: Tensor) -> Tensor:
    """Gradient of the last tap, times the number of ranks: the sum of `values[rank]` as the engine formed it."""
    model.zero_grad()
    model(values[dist.get_rank()].to(torch.bfloat16)).backward()
    gradient = full(model.taps[-1].weight.grad)
    assert torch.equal(gradient, full(model.taps[0].weight.grad))
    return gradient * dist.get_world_size()


def dtypes_on_both_tiers() -> None:
    mesh = make_mesh(2, 2)
    # bfloat16 holds 8 bits: of 256 + 1 and of 512 + 3 + 1 + 1 it loses some, wherever it is used.
    values = torch.tensor(
        [[256.0, 1, 512, 3, 1, 130], [1, 256, 3, 1, 512, 131], [1, 1, 1, 512, 1, 3], [1, 2, 2, 1, 3, 1]]
    )
    for intra, inter in itertools.product((torch.float32, torch.bfloat16), (None, torch.float32, torch.bfloat16)):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=intra, inter_reduce_dtype=inter, master_dtype=torch.float32
        )
        model = shard(Taps(2, values.shape[1]), mesh, mp_policy=policy)
        wire = inter or intra
        by_supernode = [(values[i].to(intra) + values[i + 1].to(intra)).to(wire) for i in (0, 2)]
        expected = (by_supernode[0] + by_supernode[1]).float()  # sums rest in the masters' dtype
        found = reduced(model, values)
        assert torch.equal(found, expected), f"{intra} inside, {inter} between supernodes: {found}, not {expected}"
        is_exact = torch.equal(expected, values.sum(0))
        assert is_exact == (torch.bfloat16 not in (intra, wire)), "the witness values do not tell the dtypes apart"


def test_reduce_dtype_all_axes() -> None:
    """Pytorch #190626: reduce_dtype was ignored on one of the axes (tensor parallelism's Partial -> Replicate), which
    reduced in the gradient's own bfloat16. Here: on the axis inside and on the axis between supernodes.
    """
    run_ranks(4, dtypes_on_both_tiers)


# ---- operations ------------------------------------------------------------------------------------------------------


def train_on_sums_alone() -> list[Tensor]:
    """The local gradients of this rank, compared with the slices of those of one process."""
    register_sum_only_backend()
    dist.init_process_group(SUM_ONLY)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    refuses_averages(mesh)
    gradients = []
    for policy, tolerance in ((MixedPrecisionPolicy(), 2e-5), (MIXED, 5e-2)):
        plain, sharded = pair(mesh, mp_policy=policy, bucket_bytes=1)
        for step in range(2):
            sharded.set_requires_all_reduce(step == 1)
            reference, mine = losses(plain, sharded, step)
            reference.backward()
            mine.backward()
        for expected, found in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert expected.grad is not None
            slices = [*torch.chunk(expected.grad, mesh.size(1)), expected.grad[:0]]
            local = local_tensor(found.grad)
            allowed = tolerance * float(expected.grad.abs().max())
            torch.testing.assert_close(local, slices[mesh.get_local_rank("dp_shard")], rtol=tolerance, atol=allowed)
            gradients.append(local.clone())
        assert_at_rest(sharded)
    return gradients


def refuses_averages(mesh: DeviceMesh) -> None:
    for operation in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(0.5)):  # type: ignore[attr-defined]
        with pytest.raises(SumOnlyError):
            dist.all_reduce(torch.ones(1), op=operation, group=mesh.get_group("dp_replicate"))


@pytest.mark.parametrize("transport", ["c10d"])
def test_sum_only_backend(transport: str) -> None:
    """VeOmni #241, torch-xpu-ops #1571: reductions asked for PREMUL_SUM or AVG, which HCCL and XCCL do not have. The
    back end of this test refuses every reduction but SUM, has no coalesced calls, and is not known by name.
    """
    by_rank = run_ranks(4, train_on_sums_alone, env={TRANSPORT_VARIABLE: "c10d"})
    for first, second in ((0, 2), (1, 3)):  # the same shard in two supernodes
        for mine, other in zip(by_rank[first], by_rank[second], strict=True):
            assert torch.equal(mine, other)
