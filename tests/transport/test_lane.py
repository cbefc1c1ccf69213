"""Lanes: order, errors, dispatch modes, and one lane per group."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_plugin.core.transport.lane import InlineLane, ThreadLane, lane_of
from tests.support import init_gloo, run_ranks


class Group:
    """Stands for a process group: what a lane lives as long as."""


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def lane() -> ThreadLane:
    group = Group()
    made = ThreadLane(group)  # type: ignore[arg-type]
    made._keep = group  # type: ignore[attr-defined]
    return made


def test_jobs_run_in_the_order_of_submission_beside_the_caller(lane: ThreadLane) -> None:
    order: list[int] = []
    may_run = threading.Event()

    def job(number: int) -> None:
        may_run.wait(10)
        order.append(number)

    tickets = [lane.submit(lambda number=number: job(number)) for number in range(20)]
    assert not tickets[-1].is_done and not order
    may_run.set()
    tickets[-1].wait()
    assert order == list(range(20))
    assert all(ticket.is_done for ticket in tickets)


def test_an_error_reaches_whoever_waits_and_later_jobs_still_run(lane: ThreadLane) -> None:
    def fails() -> None:
        raise ConnectionError("peer is gone")

    ran: list[bool] = []
    failing, following = lane.submit(fails), lane.submit(lambda: ran.append(True))
    following.wait()
    with pytest.raises(ConnectionError, match="peer is gone"):
        failing.wait()
    assert ran == [True]


def test_a_job_sees_the_dispatch_modes_of_its_submission_and_no_gradients(lane: ThreadLane) -> None:
    leaf = torch.ones(2, requires_grad=True)
    results: list[torch.Tensor] = []
    with Seen() as seen:
        lane.submit(lambda: results.append(leaf * 2)).wait()
    lane.submit(lambda: results.append(leaf + 1)).wait()
    assert seen.operators == ["aten::mul"]
    assert not any(result.requires_grad for result in results)


def test_the_thread_ends_with_the_group() -> None:
    group = Group()
    lane = ThreadLane(group)  # type: ignore[arg-type]
    lane.submit(lambda: None).wait()
    del group
    lane._thread.join(timeout=10)
    assert not lane._thread.is_alive()


def test_what_a_job_held_is_let_go_before_the_waiter_continues(lane: ThreadLane) -> None:
    import weakref

    held = torch.ones(3)
    gone = weakref.ref(held)
    ticket = lane.submit(lambda held=held: held.add_(1))
    del held
    ticket.wait()
    assert gone() is None


def test_a_group_of_one_rank_needs_no_queue() -> None:
    lane = lane_of(None, "cpu")
    assert isinstance(lane, InlineLane)
    ran: list[bool] = []
    assert lane.submit(lambda: ran.append(torch.is_grad_enabled())).is_done
    assert ran == [False]


def lanes_of_groups() -> tuple[bool, bool, bool]:
    import torch.distributed as dist

    init_gloo()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    threaded = isinstance(lane_of(first, "cpu"), ThreadLane)
    return threaded, lane_of(first, "cpu") is lane_of(first, "cpu"), lane_of(first, "cpu") is lane_of(second, "cpu")


def test_every_user_of_a_group_gets_the_lane_of_that_group() -> None:
    assert run_ranks(2, lanes_of_groups) == [(True, True, False)] * 2


def cross_in_order(delays: list[float]) -> list[float]:
    """Two users of one group submit all-reduces from one thread while the ranks are late by different times."""
    import torch.distributed as dist

    init_gloo()
    group = dist.new_group([0, 1])
    operands = [torch.full((4,), float(10**index)) for index in range(8)]

    def reduce(operand: torch.Tensor) -> None:
        time.sleep(delays[dist.get_rank()])
        dist.all_reduce(operand, group=group)

    for operand in operands:
        ticket = lane_of(group, "cpu").submit(lambda operand=operand: reduce(operand))
    ticket.wait()
    return [float(operand[0]) for operand in operands]


def test_collectives_of_a_lane_match_across_ranks_that_run_at_different_speeds() -> None:
    assert run_ranks(2, cross_in_order, delays=[0.0, 0.01]) == [[2.0 * 10**index for index in range(8)]] * 2
