"""Host time of a forward and backward: one step, and interleaved rounds of several models."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bench import paired


@dataclass(frozen=True)
class HostTime:
    """Seconds of one forward and backward.

    Attributes:
        cpu: CPU time of all threads of the process.
        wall: Elapsed time.
    """

    cpu: float
    wall: float


@dataclass(frozen=True)
class RoundTime:
    """One variant's steps of one round, in seconds per step.

    Attributes:
        cpu: The least CPU time of a step: what the code costs when nothing disturbs it.
        cpu_median: Median CPU time.
        wall: Median elapsed time.
    """

    cpu: float
    cpu_median: float
    wall: float

    @classmethod
    def of(cls, steps: list[HostTime]) -> RoundTime:
        """Condenses the steps of one round."""
        cpu = [step.cpu for step in steps]
        return cls(min(cpu), statistics.median(cpu), statistics.median(step.wall for step in steps))


def time_step(model: nn.Module, x: torch.Tensor) -> HostTime:
    """Times forward and backward of `model(x)`. Gradients are cleared before, outside the measured time."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    wall, cpu = time.perf_counter(), time.process_time()
    model(x).sum().backward()
    return HostTime(time.process_time() - cpu, time.perf_counter() - wall)


def measure(
    models: Mapping[str, tuple[nn.Module, torch.Tensor]], *, rounds: int, steps: int
) -> list[dict[str, RoundTime]]:
    """Runs all models in turn, forwards through the list in even rounds and backwards in odd ones.

    Args:
        models: Name -> (model, input).
        rounds: Number of rounds.
        steps: Steps of each model in a round, after one that is not counted.

    Returns:
        Per round, name -> its times.
    """
    found: list[dict[str, RoundTime]] = [{} for _ in range(rounds)]
    for index, name in paired.interleave(list(models), rounds):
        model, x = models[name]
        with _no_garbage_collection():
            time_step(model, x)
            found[index][name] = RoundTime.of([time_step(model, x) for _ in range(steps)])
    return found


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """As `timeit` does: a collection would be charged to whoever happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
