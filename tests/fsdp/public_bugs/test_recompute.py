"""Checkpointing, prefetch, frozen and ignored parameters: counts of collectives, and what is at rest afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_plugin import fully_shard
from hp_plugin.core.topology import Topology, TrafficRecorder
from tests.fsdp.public_bugs.towers import Tower, shard
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
)
from tests.support import run_ranks

KINDS = ("none", "reentrant", "non-reentrant", "pairs")
MESHES = [(1, 2), (2, 1), (2, 2)]


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


# ---- counts ----------------------------------------------------------------------------------------------------------

DEPTH, WIDTH, MICRO_BATCHES = 4, 136, 3
# Operands of a layer's collectives: its projection (72 KiB) alone, and the rest, tiny, in one pack. The root has one.
OPERANDS = 2 * DEPTH + 1


def collectives_of_a_step(*, replicate: int, shard_size: int, transport: str) -> list[str]:
    """Sentences about counts that are off."""
    mesh = make_mesh(replicate, shard_size)
    topology = Topology.from_supernode_size(replicate * shard_size, shard_size)
    problems = []
    for kind in KINDS:
        for reshard in (True, False):
            for prefetch in (0, None):
                model = Tower(DEPTH, WIDTH, checkpointing=kind)
                shard(model, mesh, reshard_after_forward=reshard, prefetch=prefetch, bucket_bytes=1)
                inputs = torch.ones(2, WIDTH, requires_grad=True)
                model(inputs).backward()
                model.fsdp_counters().reset()
                with TrafficRecorder(topology) as recorder:
                    for index in range(MICRO_BATCHES):
                        model.set_requires_all_reduce(index == MICRO_BATCHES - 1)
                        model(inputs).backward()
                expected = expected_calls(
                    replicate=replicate, shard_size=shard_size, reshard=reshard, transport=transport
                )
                found = dict(recorder.traffic.calls) | {"gathers": model.fsdp_counters().all_gathers}
                if found != expected:
                    problems.append(f"{kind}, reshard={reshard}, prefetch={prefetch}: {found}, not {expected}")
    return problems


def expected_calls(*, replicate: int, shard_size: int, reshard: bool, transport: str) -> dict[str, int]:
    """Forward gathers every unit once, backward once more if it was resharded, however often it recomputes.

    A gather, and a reduce-scatter, is one message to and one from every peer, or none in shared memory.
    """
    calls = {"gathers": 0}
    if shard_size > 1:
        gathers = 2 if reshard else 1
        calls["gathers"] = gathers * (DEPTH + 1) * MICRO_BATCHES
        if transport == "c10d":
            messages = (shard_size - 1) * (gathers + 1) * OPERANDS * MICRO_BATCHES
            calls |= {"send": messages, "recv": messages}
    if replicate > 1:
        calls["all_reduce"] = DEPTH + 1  # once per unit and step
    return calls


@pytest.mark.parametrize("mesh", [(1, 1), *MESHES], ids=name)
def test_collective_count(mesh: tuple[int, int], transport: str) -> None:
    """PyTorch #105635, PR #175406: with activation checkpointing, the recomputation in backward gathered parameters a
    second time that the backward itself had gathered, or was about to.
    """
    sizes = {"replicate": mesh[0], "shard_size": mesh[1]}
    for problems in run_ranks(mesh[0] * mesh[1], collectives_of_a_step, transport=transport, **sizes):
        assert not problems, "\n".join(problems)


# ---- at rest ---------------------------------------------------------------------------------------------------------


def training_with_recomputation(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    for kind in KINDS:
        for prefetch in (None, 1 << 30):
            plain, sharded = pair(mesh, prefetch=prefetch)
            sharded.checkpointing = kind
            for step in range(2):
                backward_and_compare(plain, sharded, step)  # asserts that everything is at rest
                with torch.no_grad():
                    sharded(batch(9)[0])
                assert_at_rest(sharded)
            # Gathered ahead or recomputed for a backward that does not come: the output of the block is not used.
            handles = [model.blocks[2].register_forward_hook(bypass) for model in (plain, sharded)]
            backward_and_compare(plain, sharded, 2)
            for handle in handles:
                handle.remove()
            if kind == "pairs":
                continue
            # Gathered ahead for a forward that does not come.
            left_out = sharded.blocks[3]
            for model in (plain, sharded):
                model.blocks = model.blocks[:3]
            backward_and_compare(plain, sharded, 3)
            assert_at_rest(left_out)


def bypass(_module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    return args[0] * 2.0


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_all_sharded_after_backward(mesh: tuple[int, int], transport: str) -> None:
    """Megatron-LM PR #6153: recomputation prefetched a layer whose backward was over, and left it unsharded."""
    run_ranks(mesh[0] * mesh[1], training_with_recomputation, replicate=mesh[0], shard_size=mesh[1])


# ---- frozen and ignored parameters -----------------------------------------------------------------------------------


def frozen_and_replicated_parameters(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    for prefetch in (0, None, 1 << 30, "lists"):
        torch.manual_seed(7)
        plain = Model()
        for parameter in (*plain.blocks[1].parameters(), plain.blocks[2].up.weight, plain.first.weight):
            parameter.requires_grad_(False)
        sharded = copy.deepcopy(plain)
        ignored = [*sharded.blocks[0].norm.parameters(), *sharded.blocks[3].parameters()]
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(ignored)}
        if prefetch != "lists":
            options["prefetch"] = prefetch
        for block in sharded.blocks:
            fully_shard(block, **options)  # the last one is a unit without a parameter
        fully_shard(sharded, **options)
        if prefetch == "lists":
            blocks: list[Any] = list(sharded.blocks)
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i])
        for step in range(3):
            reference, mine = losses(plain, sharded, step)
            reference.backward()
            mine.backward()
            for parameter in ignored:  # replicated: their gradients are the user's to reduce
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            compare(plain, sharded)
            plain.zero_grad()
            sharded.zero_grad()


def compare(plain: Model, sharded: Model) -> None:
    for (key, expected), (_, found) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, f"{key} is frozen"
        else:
            assert found.grad is not None, key
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_prefetch_with_frozen_and_replicated_parameters(mesh: tuple[int, int], transport: str) -> None:
    """hyper-parallel #545: backward prefetch together with replicated parameters crashed."""
    run_ranks(mesh[0] * mesh[1], frozen_and_replicated_parameters, replicate=mesh[0], shard_size=mesh[1])


# ---- checkpointing over several forwards -----------------------------------------------------------------------------


def two_forwards(*, replicate: int, shard_size: int) -> None:
    mesh = make_mesh(replicate, shard_size)
    for kind in KINDS:
        plain, sharded = pair(mesh)
        sharded.checkpointing = kind
        # One loss over two forwards, and a nested unit inside a checkpointed one.
        pending = [losses(plain, sharded, step) for step in range(2)]
        torch.stack([reference for reference, _ in pending]).sum().backward()
        torch.stack([mine for _, mine in pending]).sum().backward()
        assert_gradients_equal(plain, sharded)
        assert_at_rest(sharded)


@pytest.mark.parametrize("mesh", [(2, 2)], ids=name)
def test_checkpointing_with_two_forwards_before_the_backward(mesh: tuple[int, int], transport: str) -> None:
    """PyTorch #187437, #153354, PR #171779: checkpointing, nested units and two forwards mixed tensors and DTensors
    in one operation.
    """
    run_ranks(mesh[0] * mesh[1], two_forwards, replicate=mesh[0], shard_size=mesh[1])
