"""`deterministic=True`: the same bits in every run, on every transport, whatever the link between supernodes is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, clip_grad_norm_
from hp_plugin.core.fsdp import root
from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from hp_plugin.core.layout import local_tensor
from hp_plugin.core.topology.link import Link
from hp_plugin.core.transport.c10d import C10dTransport
from tests.fsdp.conftest import TRANSPORTS
from tests.fsdp.public_bugs.towers import Tower, shard
from tests.fsdp.twins import make_mesh
from tests.support import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, master_dtype=torch.float32)


def name(mesh: tuple[int, int]) -> str:
    return f"{mesh[0]}x{mesh[1]}"


def train(*, replicate: int, shard_size: int) -> list[Tensor]:
    """Local gradients of every step, and the local weights of the end, for fp32 and bf16."""
    mesh = make_mesh(replicate, shard_size)
    seen = []
    for policy in (MixedPrecisionPolicy(), BF16):
        torch.manual_seed(3)
        model = shard(Tower(4, 24), mesh, mp_policy=policy, deterministic=True)
        optimizer = HyperAdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            for index in range(2):
                model.set_requires_all_reduce(index == 1)
                model(torch.randn(3, 24, generator=generator)).backward()
            seen += [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        seen += [local_tensor(p).clone() for p in model.parameters()]
    return seen


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=name)
def test_runs_have_the_same_bits_twice_and_across_transports(mesh: tuple[int, int]) -> None:
    runs = [
        run_ranks(4, train, env={TRANSPORT_VARIABLE: transport}, replicate=mesh[0], shard_size=mesh[1])
        for transport in (*TRANSPORTS, *TRANSPORTS)
    ]
    for run in runs[1:]:
        for mine, first in zip(run, runs[0], strict=True):
            assert len(mine) == len(first) > 50
            assert all(torch.equal(a, b) for a, b in zip(mine, first))


def buckets(*, deterministic: bool) -> list[int]:
    """How many messages cross between supernodes, for a link of little and of much latency."""
    mesh = make_mesh(4, 1)
    counts = []
    for latency in (1e-6, 10.0):
        with mock.patch.object(root, "measure_link", return_value=Link(latency=latency, bandwidth=1e9)):
            model = shard(Tower(6, 512), mesh, deterministic=deterministic)
            model(torch.ones(2, 512)).backward()
            counts.append(len(root.unit_of(model).root.pipeline.buckets))  # type: ignore[union-attr]
    return counts


def test_buckets_do_not_follow_the_measured_link() -> None:
    assert all(len(set(counts)) == 1 for counts in run_ranks(4, buckets, deterministic=True))
    assert all(len(set(counts)) == 2 for counts in run_ranks(4, buckets, deterministic=False)), "the control"


def is_ordered(*, deterministic: bool) -> bool:
    mesh = make_mesh(1, 2)
    model = shard(Tower(2, 24), mesh, deterministic=deterministic, transport="c10d")
    model(torch.ones(2, 24)).backward()
    transports = [unit._transport for unit in root.unit_of(model).root.units]  # type: ignore[union-attr]
    assert all(isinstance(each, C10dTransport) for each in transports)
    return all(each is not None and each.adds_in_rank_order for each in transports)


@pytest.mark.parametrize("deterministic", [True, False])
def test_back_ends_with_an_order_of_their_own_are_told(deterministic: bool) -> None:
    assert run_ranks(2, is_ordered, deterministic=deterministic) == [deterministic] * 2
