"""Rank function: the schedule of a small step as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from hp_plugin import fully_shard
from tests.fsdp.twins import make_mesh

WIDTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def warmed_up(replicate: int, shard: int) -> Any:
    """The model after two steps: order and plan are known by then."""
    mesh = make_mesh(replicate, shard)
    model: Any = Model()
    two_layers = 2 * 4 * (WIDTH * WIDTH + WIDTH) // shard
    for module in (model.embedding, *model.layers, model.head):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, bucket_bytes=two_layers)
    for _ in range(2):
        model(torch.arange(8)).sum().backward()
        model.zero_grad()
    return model


def record(replicate: int, shard: int) -> str:
    """The table of the third step."""
    model = warmed_up(replicate, shard)
    with model.record_fsdp_schedule() as schedule:
        model(torch.arange(8)).sum().backward()
    table: str = schedule.table()
    return table


def profiler_ranges(replicate: int, shard: int) -> dict[str, int]:
    """How often each range of ours is in the trace of the third step."""
    model = warmed_up(replicate, shard)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.arange(8)).sum().backward()
    return Counter(event.name for event in profile.events() if event.name.startswith("hyperfsdp "))
