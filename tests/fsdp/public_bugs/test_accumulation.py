"""Sums over micro-batches: precision, axes of size 1, and what is kept between micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_plugin import MixedPrecisionPolicy
from tests.fsdp.public_bugs.probes import forget_what_is_alive, settled_live_bytes
from tests.fsdp.public_bugs.towers import Taps, Tower, shard
from tests.fsdp.twins import full, make_mesh
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")

MODES = ("plain", "all_reduce_last", "sync_last")
ONE = (1, 1), (1, 2), (2, 1)


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


def backwards(model: Any, mode: str, batches: list[torch.Tensor]) -> Iterator[int]:
    """Forward and backward of every batch; yields its number after each."""
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if mode == "all_reduce_last":
            model.set_requires_all_reduce(is_last)
        elif mode == "sync_last":
            model.set_requires_gradient_sync(is_last)
        model(batch).backward()
        yield index


def all_of(model: Any, mode: str, batches: list[torch.Tensor]) -> None:
    for _ in backwards(model, mode, batches):
        pass


# ---- precision -------------------------------------------------------------------------------------------------------

COUNT = 32
VALUE = 1 + 6 * 2**-7  # exact in bfloat16; a bfloat16 sum of it soon is not


def sums_of_many_micro_batches() -> None:
    mesh = make_mesh(2, 2)
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, master_dtype=fp32), MODES),
        (
            MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, inter_reduce_dtype=bf16, master_dtype=fp32),
            ("all_reduce_last",),
        ),
        # Only what travels is bfloat16: the masters' dtype decides in what micro-batches add up.
        (
            MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, master_dtype=fp32),
            ("all_reduce_last", "sync_last"),
        ),
        # A bfloat16 model without masters: one rounding, at the end. "plain" adds every micro-batch to bfloat16.
        (MixedPrecisionPolicy(reduce_dtype=fp32), ("all_reduce_last", "sync_last")),
    ]
    for policy, modes in cases:
        for mode in modes:
            model = Taps(1, 40)
            if policy.param_dtype is None:
                model = model.bfloat16()
            shard(model, mesh, mp_policy=policy)
            all_of(model, mode, [torch.full((40,), VALUE, dtype=bf16)] * COUNT)
            for tap in model.taps:
                found = full(tap.weight.grad).float()
                assert torch.equal(found, torch.full((40,), COUNT * VALUE)), f"{policy}, {mode}: {found[0]}"


def test_accum_precision() -> None:
    """PyTorch PR #194628: HSDP kept the sum over micro-batches in the reduce dtype of the wire, so that each was
    rounded into it and the error grew with their number.
    """
    naive = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(COUNT):
        naive += VALUE
    assert naive != COUNT * VALUE, "the value cannot show a rounded sum"
    run_ranks(4, sums_of_many_micro_batches)


# ---- axes of size 1 --------------------------------------------------------------------------------------------------


def three_micro_batches(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [torch.full((5,), float((rank + 1) * 10**index)) for index in range(3)]
    mean = 111.0 * sum(range(1, world + 1)) / world
    for mode in MODES:
        for reshard in (True, False):
            model = shard(Taps(3, 5), mesh, reshard_after_forward=reshard)
            for step in (1, 2):  # without zero_grad in between: the second step adds to the first
                all_of(model, mode, batches)
                for tap in model.taps:
                    assert torch.equal(full(tap.weight.grad), torch.full((5,), step * mean)), f"{mode}, step {step}"
                assert torch.equal(full(model.start.grad), torch.full((1,), step * 3.0))


@pytest.mark.parametrize("mesh", ONE, ids=name)
def test_three_micro_batches_on_axes_of_size_one(mesh: tuple[int, int]) -> None:
    """Megatron-LM #6660: with one data-parallel rank gradients were scaled 2^N times. hyper-parallel #306, Fast-LLM
    #550: a group of one rank took a path that was skipped, or kept the last micro-batch only. Each micro-batch of this
    test has a decimal digit of its own.
    """
    run_ranks(mesh[0] * mesh[1], three_micro_batches, replicate=mesh[0], shard_size=mesh[1])


# ---- no_sync ---------------------------------------------------------------------------------------------------------

DEPTH, WIDTH = 3, 160  # projections of 100 KiB, which travel alone, and packs of tiny parameters
PARAMETERS = DEPTH * (WIDTH * WIDTH + 3 * WIDTH) + 3 * WIDTH + 3
SLACK = 4 * 32 * 4 * (DEPTH + 1)  # slots start at multiples of 32 elements


def memory_and_values_without_sync() -> dict[str, list[int]]:
    mesh = make_mesh(2, 2)
    forget_what_is_alive()
    grown: dict[str, list[int]] = {}
    for mode in ("all_reduce_last", "sync_last"):
        torch.manual_seed(3)
        plain, model = Tower(DEPTH, WIDTH), Tower(DEPTH, WIDTH)
        model.load_state_dict(plain.state_dict())
        shard(model, mesh, prefetch=0)
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randn(4, 2, WIDTH, generator=generator) for _ in range(4)]
        all_of(model, "plain", [rows[0][dist.get_rank()]])  # buffers that stay are made here
        model.zero_grad()
        with torch.no_grad():
            model(rows[0][0])  # gradient memory is given back when a forward begins
        before = settled_live_bytes()
        grown[mode] = []
        for _ in backwards(model, mode, [batch[dist.get_rank()] for batch in rows]):
            dist.barrier()  # every rank has issued everything
            grown[mode].append(settled_live_bytes() - before)
        for batch in rows:
            (sum(plain(row) for row in batch) / 4).backward()
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=2e-5, atol=1e-6)
    return grown


def test_no_sync_memory_and_value() -> None:
    """hyper-parallel #550, verl PR #7458: gradients under no_sync were wrong, or a full fp32 copy of them was kept on
    every rank. With set_requires_all_reduce(False) a rank keeps its shard of the sum and no more, in the buffer that
    `.grad` takes afterwards; without any synchronisation, what is kept is the full gradient, once.
    """
    for grown in run_ranks(4, memory_and_values_without_sync):
        shard_bytes, full_bytes = PARAMETERS * 4 // 2, PARAMETERS * 4
        for kept in [*grown["all_reduce_last"], grown["sync_last"][-1]]:
            assert shard_bytes <= kept <= shard_bytes + SLACK, "one buffer, which becomes .grad"
        for kept in grown["sync_last"][:-1]:
            assert full_bytes <= kept <= full_bytes + SLACK
        assert shard_bytes > 4 * SLACK, "the slack hides what is to be seen"
