"""Rank functions of the tests of how shared memory fails in training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from hp_plugin import HyperAdamW
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.fsdp.shared_fulls import AliasedFulls
from hp_plugin.core.transport.shm import GradientRing
from tests.faults.cases import _loss, _sharded
from tests.faults.watched import End, end_process, watch
from tests.support import init_gloo

BAD_STEP = 1
STEPS = 4
Fail = Callable[[], None]


# ---- one rank fails in a phase of training ------------------------------------------------------------------------


def train_and_fail(
    *,
    phase: str,
    how: str,
    replicate: int,
    shard: int,
    residence: str,
    timeout_s: float,
    directory: str,
    failing: list[int],
) -> tuple[End, float | None]:
    """Trains in a child of each rank; those of `failing` end in `phase`.

    Returns:
        How the child ended, and when it was made to fail, on the clock of the host.
    """

    def work() -> None:
        init_gloo(timeout_s=timeout_s)
        model = _sharded(replicate, shard, timeout_s=timeout_s, residence=residence)
        _train(model, phase, how if int(os.environ["RANK"]) in failing else None, directory)

    end = watch(work, directory=directory, ranks=replicate * shard)
    try:
        with open(os.path.join(directory, f"failed.{os.environ['RANK']}")) as noted:
            return end, float(noted.read())
    except FileNotFoundError:
        return end, None


def _train(model: nn.Module, phase: str, how: str | None, directory: str) -> None:
    optimizer = HyperAdamW(model.parameters())
    here = ""

    def fail() -> None:
        assert how is not None
        with open(os.path.join(directory, f"failed.{os.environ['RANK']}"), "w") as noted:
            noted.write(repr(time.monotonic()))
        end_process(how)

    def fail_in(current: str) -> None:
        if current == phase and how is not None:
            fail()

    if how is not None and phase in _INJECTIONS:
        _INJECTIONS[phase](model, lambda: fail() if here == "bad step" else None)
    fail_in("set-up")
    for step in range(STEPS):
        here = "bad step" if step == BAD_STEP else ""
        _loss(model, step).backward()
        if here:
            fail_in("step")
        optimizer.step()
        optimizer.zero_grad()
        if here:
            fail_in("between steps")


def _in_forward(model: Any, fail: Fail) -> None:
    # Before the hook of the unit, and before this rank publishes anything of the block that follows.
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: fail(), prepend=True)


def _in_backward(model: Any, fail: Fail) -> None:
    # The gradients of the last block are with the lane, those of this one are not written.
    model.blocks[1].register_full_backward_pre_hook(lambda module, gradient: fail())


def _on_the_lane(model: Any, fail: Fail) -> None:
    add_up = GradientRing._sum

    def failing(self: GradientRing, *arguments: Any) -> None:
        fail()
        add_up(self, *arguments)

    GradientRing._sum = failing  # type: ignore[method-assign]


def _inside_the_step(model: Any, fail: Fail) -> None:
    # Aliased shards of the units before are written when those of the last block are to be.
    before_update = AliasedFulls.before_update
    last = unit_of(model.blocks[-1])

    def failing(self: AliasedFulls) -> None:
        if self._unit is last:
            fail()
        before_update(self)

    AliasedFulls.before_update = failing  # type: ignore[method-assign]


_INJECTIONS: dict[str, Callable[[Any, Fail], None]] = {
    "forward": _in_forward,
    "backward": _in_backward,
    "lane": _on_the_lane,
    "inside the step": _inside_the_step,
}


def losses_after(*, steps: int, replicate: int, shard: int) -> list[float]:
    """Losses of training that nothing disturbs."""
    init_gloo()
    return _losses(_sharded(replicate, shard), steps)


def _losses(model: nn.Module, steps: int) -> list[float]:
    optimizer = HyperAdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
