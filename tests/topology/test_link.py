"""The measured link and the message size that follows from it."""

from __future__ import annotations

import pytest
import torch

from hp_plugin.core.topology import Link, measure_link
from tests.support import init_gloo, run_ranks

MIB = 1 << 20


@pytest.mark.parametrize(
    ("latency", "bandwidth", "message"),
    [
        (0.75e-3, 118e6, MIB),  # 1 Gbit/s in a data centre: latency does not matter at a mebibyte
        (11.7e-3, 118e6, 4 * MIB),  # 1 Gbit/s and 5 ms one way: 1.4 MB are in flight per latency
        (20e-6, 50e9, 2 * MIB),  # 400 Gbit/s
        (50e-3, 10e9, 64 * MIB),  # never more than that
        (0.0, 1e9, MIB),
    ],
)
def test_a_message_takes_some_latencies(latency: float, bandwidth: float, message: int) -> None:
    assert Link(latency, bandwidth).message_bytes == message


def measure() -> tuple[float, float, int]:
    import torch.distributed as dist

    init_gloo()
    link = measure_link(dist.group.WORLD, torch.device("cpu"))
    assert link is not None
    return link.latency, link.bandwidth, link.message_bytes


def test_all_ranks_agree_on_what_was_measured() -> None:
    first, *others = run_ranks(4, measure)
    assert all(other == first for other in others)
    latency, bandwidth, _ = first
    assert 0 < latency < 5
    assert 0 < bandwidth < 1e12


def measure_without_network() -> bool:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    return measure_link(dist.group.WORLD, torch.device("cpu")) is None


def test_a_back_end_that_moves_nothing_is_not_measured() -> None:
    assert run_ranks(1, measure_without_network) == [True]
