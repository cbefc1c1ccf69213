"""What a steady step costs the host, in counts: DTensors, dispatch through them, and launches of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_plugin import HyperAdamW, clip_grad_norm_
from hp_plugin.core.topology import Topology, TrafficRecorder
from tests.fsdp.public_bugs.probes import count_dtensor_work
from tests.fsdp.public_bugs.towers import Tower, shard
from tests.fsdp.twins import make_mesh
from tests.support import run_ranks

DEPTH, WIDTH, MICRO_BATCHES = 3, 136, 3
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]
MODES = ("plain", "all_reduce_last", "sync_last")


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


def train_step(model: Any, optimizer: torch.optim.Optimizer, mode: str, *, clip: Any) -> None:
    inputs = torch.ones(2, WIDTH)
    for index in range(MICRO_BATCHES):
        if mode == "all_reduce_last":
            model.set_requires_all_reduce(index == MICRO_BATCHES - 1)
        elif mode == "sync_last":
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
        model(inputs).backward()
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def dtensor_work(*, replicate: int, shard_size: int) -> dict[str, tuple[int, int]]:
    """By mode: DTensors constructed and operators dispatched through one, in a steady step."""
    mesh = make_mesh(replicate, shard_size)
    found = {}
    for mode in MODES:
        model = shard(Tower(DEPTH, WIDTH), mesh)
        optimizer = HyperAdamW(model.parameters(), lr=1e-3)
        train_step(model, optimizer, mode, clip=clip_grad_norm_)
        with count_dtensor_work() as work:
            train_step(model, optimizer, mode, clip=clip_grad_norm_)
        found[mode] = (work.constructed, work.dispatched.total())
    # The control: torch's own optimizer on the same parameters goes through DTensor.
    model = shard(Tower(DEPTH, WIDTH), mesh)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with count_dtensor_work() as work:
        train_step(model, theirs, "plain", clip=nn.utils.clip_grad_norm_)
    found["control"] = (work.constructed, work.dispatched.total())
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=name)
@pytest.mark.usefixtures("transport")
def test_zero_torch_dispatch_calls(mesh: tuple[int, int]) -> None:
    """PyTorch #166598, #172350, #179502: sharding rules of DTensor that were silently wrong (matmul, index_put, view);
    ms-swift #7871: an operator without a rule. What never reaches DTensor's dispatch cannot be wrong there: forward,
    backward, clipping and HyperAdamW dispatch nothing through it.
    """
    for found in run_ranks(mesh[0] * mesh[1], dtensor_work, replicate=mesh[0], shard_size=mesh[1]):
        control = found.pop("control")
        assert found == dict.fromkeys(MODES, (0, 0))
        assert min(control) > 0, "the probe sees nothing"


def launches(*, replicate: int, shard_size: int) -> dict[str, dict[str, int]]:
    """Collectives that Python launches in a steady step without optimizer, by mode."""
    mesh = make_mesh(replicate, shard_size)
    topology = Topology.from_supernode_size(replicate * shard_size, shard_size)
    found = {}
    for mode in MODES:
        model = shard(Tower(DEPTH, WIDTH), mesh, bucket_bytes=1 << 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            with TrafficRecorder(topology) as recorder:
                train_step(model, optimizer, mode, clip=lambda *_: None)
        found[mode] = dict(recorder.traffic.calls)
    return found


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=name)
def test_launches_per_layer(mesh: tuple[int, int], transport: str) -> None:
    """PyTorch #173680, #134191: the host time of FSDP2, half of a step in pre_forward. The part of it that can be
    counted: a layer of one projection and three tiny parameters launches two gathers in each direction and two
    exchanges, not four, and all layers share one message between supernodes. In shared memory it launches nothing.
    """
    replicate, shard_size = mesh
    operands = 2 * DEPTH + 1  # the root's two parameters, tiny, are one
    gathers = (2 * 2 * DEPTH + 1) * MICRO_BATCHES  # the root is kept for backward
    for found in run_ranks(replicate * shard_size, launches, replicate=replicate, shard_size=shard_size):
        for mode, calls in found.items():
            reductions = 1 if mode == "sync_last" else MICRO_BATCHES
            expected = {}
            if shard_size > 1 and transport == "c10d":  # shared memory is read, nothing is launched
                messages = (shard_size - 1) * (gathers + operands * reductions)
                expected = {"send": messages, "recv": messages}
            if replicate > 1:
                expected["all_reduce"] = MICRO_BATCHES if mode == "plain" else 1
            assert calls == expected, mode
