"""Ranks on loopback give their results, or end together with a message."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from bench.errors import BenchError
from bench.loopback import run_on_loopback


def _sum_of_ranks(*, offset: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value), torch.get_num_threads()


def _fail_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("this rank had enough")
    dist.barrier()


def _die_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60.0)


def _sleep() -> None:
    time.sleep(60.0)


def test_results_come_in_rank_order_from_one_thread_each() -> None:
    assert run_on_loopback(_sum_of_ranks, nprocs=2, timeout_s=60.0, offset=10) == [(21, 1)] * 2


@pytest.mark.parametrize(
    ("target", "timeout_s", "message"),
    [
        (_fail_on_rank_1, 60.0, "this rank had enough"),
        (_die_on_rank_1, 60.0, "rank 1 died"),
        (_sleep, 3.0, "did not finish within 3 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_failure_ends_all_ranks(target: object, timeout_s: float, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(BenchError, match=message):
        run_on_loopback(target, nprocs=2, timeout_s=timeout_s)  # type: ignore[arg-type]
    assert time.monotonic() - start < 50.0
    assert multiprocessing.active_children() == []
