"""Counters are exact: only the thread that computes changes them."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hp_plugin import MixedPrecisionPolicy
from tests.fsdp.twins import batch, make_mesh, pair
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")


def threads_that_count(replicate: int, shard: int) -> set[str]:
    """Names of the threads that change the counters of a root: `+=` of two threads at once loses one of them."""
    _, sharded = pair(make_mesh(replicate, shard), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sharded(batch(0)[dist.get_rank()]).square().mean().backward()
    counters = sharded.fsdp_counters()
    names: set[str] = set()
    change = type(counters).__setattr__

    def noting(self: Any, name: str, value: Any) -> None:
        if self is counters:
            names.add(threading.current_thread().name)
        change(self, name, value)

    with mock.patch.object(type(counters), "__setattr__", noting):
        sharded(batch(1)[dist.get_rank()]).square().mean().backward()
    assert counters.copied_bytes > 0
    return names


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_only_the_computing_thread_changes_counters(mesh: tuple[int, int]) -> None:
    for names in run_ranks(mesh[0] * mesh[1], threads_that_count, replicate=mesh[0], shard=mesh[1]):
        assert names == {"MainThread"}
