"""Reductions in flight: what they keep alive."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_plugin import fully_shard
from hp_plugin.core.fsdp.gradients import storage_references
from hp_plugin.core.fsdp.operand import PACK_BYTES
from tests.fsdp.twins import make_mesh
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")

WIDTH, LAYERS = 256, 6
LATE_S = 0.02


class Layer(nn.Module):
    """A projection that says when its weight's gradient is there, and lets one rank be late with it."""

    def __init__(self, log: GradientLog) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self._log: GradientLog | None = log

    def forward(self, x: Tensor) -> Tensor:
        if self._log is not None:
            self.weight.register_post_accumulate_grad_hook(self._log.add)
            self._log = None  # the full parameter is one tensor for life
        return nn.functional.linear(x, self.weight)


class GradientLog:
    """Aliases of all gradients so far, and how many of these someone else still held whenever one came."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._seen: list[Tensor] = []
        self.alive: list[int] = []

    def add(self, parameter: Tensor) -> None:
        """A gradient has come."""
        time.sleep(self._delay_s)
        assert parameter.grad is not None
        self._seen.append(parameter.grad.detach())
        alone = storage_references(torch.empty(1))
        self.alive.append(sum(storage_references(one) > alone for one in self._seen))


def gradients_alive(replicate: int, shard: int) -> list[list[int]]:
    """By backward, with the last rank of each shard group late: how many gradients existed when each of them came."""
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(1)
    log = GradientLog(LATE_S if dist.get_rank() % shard == shard - 1 else 0.0)
    model = nn.Sequential(*(Layer(log) for _ in range(LAYERS)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    found = []
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        found.append(log.alive)
        log.alive, log._seen = [], []
    return found


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_the_gradients_of_two_units_at_most_exist_at_once(mesh: tuple[int, int]) -> None:
    assert WIDTH * WIDTH * 4 >= PACK_BYTES
    for by_backward in run_ranks(mesh[0] * mesh[1], gradients_alive, replicate=mesh[0], shard=mesh[1]):
        for alive in by_backward:
            assert len(alive) == LAYERS
            assert alive[0] == 1
            assert max(alive) <= 2, alive
