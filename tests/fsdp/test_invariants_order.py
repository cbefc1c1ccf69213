"""Every rank enters every collective in the same order, whatever its data, its gradients and its branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_plugin import HyperAdamW, clip_grad_norm_, fully_shard
from tests.fsdp.public_bugs.probes import Channel, Collective, CollectiveLog
from tests.fsdp.twins import assert_at_rest, full, make_mesh
from tests.support import run_ranks

WIDTH = 12


class Branching(nn.Module):
    """Runs one of two projections, by the sign of its input, or none of them, by its size. (rows, width) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total = float(x.detach().sum())
        if abs(total) > 1e3:
            return x * 2.0
        return x * self.gain + (self.left(x) if total > 0 else self.right(x))


class Model(nn.Module):
    """Blocks with branches of their own, and a head of which some rank uses only a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Branching() for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        x = x + self.first(x)  # so that a gradient passes through every block, whatever it does
        for block in self.blocks:
            x = block(x)
        return self.heads[head](x).square().mean()


def inputs_of(rank: int, step: int) -> Tensor:
    """Positive on even ranks, negative on odd ones, and on one rank per step too large for any projection."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).abs()
    if rank == step % dist.get_world_size():
        x = x * 1e4
    return x if rank % 2 == 0 else -x


Calls = tuple[dict[tuple[int, ...], list[Collective]], dict[Channel, list[Collective]], dict[Channel, list[Collective]]]


def train_with_branches(*, replicate: int, shard: int) -> tuple[Calls, list[set[str]], list[Tensor]]:
    """What this rank communicated, the names of parameters without a gradient, and weights in the end."""
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(1)
    model: Any = Model()
    unused: list[set[str]] = []
    for block in model.blocks:
        fully_shard(block, mesh=mesh, bucket_bytes=600)
    fully_shard(model, mesh=mesh, bucket_bytes=600)
    optimizer = HyperAdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank()
    touched = watch_uses(model)
    with CollectiveLog() as log:
        for step in range(3):
            for index in range(2):
                model.set_requires_all_reduce(index == 1)
                model(inputs_of(rank, step), head=(rank + step) % 2).backward()
                assert_at_rest(model)
            unused.append({n for n, _ in model.named_modules() if n.endswith(("left", "right"))} - touched)
            touched.clear()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return (log.by_group, log.sent, log.received), unused, [full(p).detach() for p in model.parameters()]


def watch_uses(model: nn.Module) -> set[str]:
    touched: set[str] = set()
    for key, module in model.named_modules():
        module.register_forward_hook(lambda *_, key=key: touched.add(key) and None)
    return touched


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_ranks_agree_on_every_collective(mesh: tuple[int, int], transport: str) -> None:
    results = run_ranks(mesh[0] * mesh[1], train_with_branches, replicate=mesh[0], shard=mesh[1])
    assert len({repr(unused) for _, unused, _ in results}) > 1, "all ranks took the same branches"
    groups: dict[tuple[int, ...], list[list[Collective]]] = {}
    sent: dict[Channel, list[Collective]] = {}
    received: dict[Channel, list[Collective]] = {}
    for (log, sent_here, received_here), _, _ in results:
        for group, calls in log.items():
            groups.setdefault(group, []).append(calls)
        sent |= sent_here
        received |= received_here
    assert groups
    assert bool(sent) == (mesh[1] > 1 and transport == "c10d")
    assert sent == received
    for group, logs in groups.items():
        assert len(logs) == len(group), f"{group}: a member entered no collective of it"
        for calls in logs[1:]:
            assert calls == logs[0], f"{group}"
    for _, _, weights in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(weights, results[0][2], strict=True))
