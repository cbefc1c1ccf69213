"""What a HyperFSDP job waits for and sends, beside Megatron's own log line and among its TensorBoard and wandb scalars.

Every `--log-interval` iterations the last rank, which prints Megatron's line, prints one of ours:

    hyperfsdp iteration 20: train step 812.4 ms, of it waiting 3.1 % (all_gather 11.2 ms, end_of_backward 14.0 ms) |
    intra-supernode 1.34 GB | inter-supernode 168.0 MB

All numbers are means per iteration, of the rank with the largest one. Bytes are those of operands (the full tensor of
an all-gather or reduce-scatter, the buffer of an all-reduce), see `hp_plugin.core.fsdp.counters`. On CPU waits are
those of the computing thread; on devices the time in which the computing stream stood still, taken by events: waits
that it has not passed when a step is reported count for a later one.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.megatron import reporting
from hp_plugin.megatron.validation.steps import validate_steps

PREFIX = "hyperfsdp"
"""Of the scalars: `hyperfsdp/wait-ms/<cause>`, `hyperfsdp/intra-bytes` and so on."""

_BESIDE = (WaitCause.PEERS.value, WaitCause.RING.value)
"""Waits of a lane, beside the computing thread: reported, but no part of the time that a step waits."""

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def report_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `train_step`, followed by the report, and in validation mode compared.

    Models that are not wrapped in HyperFSDP are left alone.
    """
    signature = inspect.signature(original)
    log, scalars = Window(), Window()

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        model = signature.bind(*args, **kwargs).arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        if not all(hasattr(chunk, "counters") for chunk in chunks):
            return original(*args, **kwargs)
        before, start = totals(chunk.counters() for chunk in chunks), time.perf_counter()
        result = original(*args, **kwargs)
        seconds, now = time.perf_counter() - start, totals(chunk.counters() for chunk in chunks)
        step = {name: value - before[name] for name, value in now.items()}
        for window in (log, scalars):
            window.add({**step, "seconds": seconds})
        _report(log, scalars)
        return result

    return validate_steps(train_step)


class Window:
    """Totals of the steps since the last report."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, float] = {}

    def add(self, step: dict[str, float]) -> None:
        """Adds the numbers of one step, the same names each time."""
        self._steps += 1
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in step.items()}

    def means(self) -> dict[str, float]:
        """Means per step, by name; starts the next window."""
        found = {name: value / self._steps for name, value in self._sums.items()}
        self._steps, self._sums = 0, {}
        return found


def totals(counters: Iterable[Counters]) -> dict[str, float]:
    """Sums over the chunks of a rank: seconds waited by cause, bytes by tier, by name in a fixed order."""
    found: dict[str, float] = {f"wait/{cause.value}": 0.0 for cause in WaitCause}
    found.update({"intra_bytes": 0.0, "inter_bytes": 0.0})
    for each in counters:
        for cause, wait in each.waits.items():
            found[f"wait/{cause}"] += wait.seconds
        found["intra_bytes"] += each.all_gather_bytes + each.reduce_scatter_bytes
        found["inter_bytes"] += each.all_reduce_bytes + each.owner_reduction_bytes
    return found


def log_line(iteration: int, means: dict[str, float]) -> str:
    """The line for people; see the module."""
    waits = {name.partition("/")[2]: value for name, value in means.items() if name.startswith("wait/")}
    waited = sum(value for cause, value in waits.items() if cause not in _BESIDE)
    parts = ", ".join(
        f"{cause} {value * 1e3:.1f} ms{' beside' if cause in _BESIDE else ''}"
        for cause, value in waits.items()
        if value
    )
    share = waited / means["seconds"] * 100 if means["seconds"] else 0.0
    return (
        f"{PREFIX} iteration {iteration}: train step {means['seconds'] * 1e3:.1f} ms, of it waiting {share:.1f} %"
        f" ({parts or 'nothing'}) | intra-supernode {_size(means['intra_bytes'])} | "
        f"inter-supernode {_size(means['inter_bytes'])}"
    )


def named_scalars(means: dict[str, float]) -> dict[str, float]:
    """The same as scalars: milliseconds and bytes per iteration."""
    found = {}
    for name, value in means.items():
        if name.startswith("wait/"):
            found[f"{PREFIX}/wait-ms/{name.partition('/')[2]}"] = value * 1e3
        elif name == "seconds":
            found[f"{PREFIX}/train-step-ms"] = value * 1e3
        else:
            found[f"{PREFIX}/{name.replace('_', '-')}"] = value
    return found


def _report(log: Window, scalars: Window) -> None:
    from megatron.training import get_args

    args = get_args()
    iteration = args.curr_iteration + 1
    # Ranks decide alike, since they reduce: by arguments, and not by who has a writer.
    writes = getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)
    if writes and iteration % args.tensorboard_log_interval == 0:
        _write(named_scalars(_largest_over_ranks(scalars.means())), iteration)
    if iteration % args.log_interval == 0:
        line = log_line(iteration, _largest_over_ranks(log.means()))
        if dist.get_rank() == dist.get_world_size() - 1:
            reporting.say_here(line)


def _write(values: dict[str, float], iteration: int) -> None:
    from megatron.training import global_vars

    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)


def _largest_over_ranks(means: dict[str, float]) -> dict[str, float]:
    """Every rank must call. One all-reduce of a few numbers."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    values = torch.tensor(list(means.values()), dtype=torch.float32, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(means, values.tolist()))


def _size(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"
