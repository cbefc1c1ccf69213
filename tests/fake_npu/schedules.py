"""Steps of small models on the fake device, with what happened on its streams. One process plays rank 0 of 8."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_plugin import HyperAdamW, HyperMuon, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from hp_plugin.core.devices.capabilities import HCCL_COALESCED_VARIABLE
from hp_plugin.core.fsdp.counters import Counters, WaitCause
from tests.fake_npu import device, happens_before
from tests.fake_npu.happens_before import Fault

WIDTH = 48
WORLD = 8
_STEPS = 2


class Block(nn.Module):
    """Two matrices, biases and a norm: operands that travel alone and in a pack, one with rows that do not divide."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 349), nn.Linear(349, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self._checkpoints:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x * self.scale)))


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.skips: int | None = None
        """The layer that the next forward leaves out."""
        self.fails_at: int | None = None
        """The layer in whose backward the next backward raises."""
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Block(checkpoints=checkpoints) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number != self.skips:
                x = layer(x)
            if number == self.fails_at:
                x.register_hook(_fail)
        return self.head(x)


class BackwardFailedError(Exception):
    """Raised on purpose."""


def _fail(_: Tensor) -> None:
    raise BackwardFailedError


def _nothing(model: Any, micro_batch: int) -> None:
    pass


def _all_reduce_at_the_end(model: Any, micro_batch: int) -> None:
    model.set_requires_all_reduce(micro_batch == 2)


def _sync_at_the_end(model: Any, micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == 2)


def _flush_at_the_end(model: Any, micro_batch: int) -> None:
    model.set_is_last_backward(micro_batch == 2)


def _skip_the_third_layer_now_and_then(model: Any, micro_batch: int) -> None:
    model.skips = 2 if model.skips is None else None


def _fail_at_first(model: Any, micro_batch: int) -> None:
    model.fails_at = 1 if micro_batch == 0 else None


@dataclass(frozen=True)
class Schedule:
    """One way to train.

    Attributes:
        replicate: Supernodes.
        shard: Ranks of each.
        micro_batches: Backward passes of a step.
        before: Called with the model and the number of the micro-batch before its forward.
        options: Of `fully_shard`.
        muon: Options of the HyperMuon that steps; None: HyperAdamW does.
        checkpoints: Whether blocks recompute their forward.
        coalesces: Whether all operands of a unit leave in one launch.
    """

    replicate: int = 2
    shard: int = 4
    micro_batches: int = 1
    before: Callable[[Any, int], None] = _nothing
    options: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] | None = None
    checkpoints: bool = False
    coalesces: bool = False


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
_BF16_WIRE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, inter_reduce_dtype=torch.bfloat16
)

_OWNERS = {"gradients": "owner", "momentum_placement": "owner"}

SCHEDULES: dict[str, Schedule] = {
    "plain": Schedule(),
    "coalesced": Schedule(coalesces=True),
    "coalesced, bf16, partial sums": Schedule(
        micro_batches=3, before=_all_reduce_at_the_end, options={"mp_policy": _BF16}, coalesces=True
    ),
    "one bucket for each unit": Schedule(options={"bucket_bytes": 1}),
    "one replica": Schedule(replicate=1, shard=8),
    "replicas alone": Schedule(replicate=8, shard=1),
    "three micro-batches, each reduced": Schedule(micro_batches=3),
    "three micro-batches, window of one": Schedule(micro_batches=3, options={"bucket_bytes": 1, "window": 1}),
    "partial sums inside the supernode": Schedule(micro_batches=3, before=_all_reduce_at_the_end),
    "no communication until the last": Schedule(micro_batches=3, before=_sync_at_the_end),
    "no flush until the last": Schedule(micro_batches=3, before=_flush_at_the_end),
    "bf16": Schedule(options={"mp_policy": _BF16}),
    "bf16, partial sums": Schedule(micro_batches=3, before=_all_reduce_at_the_end, options={"mp_policy": _BF16}),
    "bf16 between supernodes": Schedule(options={"mp_policy": _BF16_WIRE}),
    "deterministic": Schedule(options={"deterministic": True}),
    "kept over two ranks": Schedule(options={"reshard_after_forward": 2}),
    "not resharded": Schedule(options={"reshard_after_forward": False}),
    "no prefetch": Schedule(options={"prefetch": 0}),
    "checkpointed": Schedule(checkpoints=True),
    "another order each time": Schedule(micro_batches=3, before=_skip_the_third_layer_now_and_then),
    "a backward that fails": Schedule(micro_batches=2, before=_fail_at_first),
    "a backward that fails, one bucket for each unit": Schedule(
        micro_batches=2, before=_fail_at_first, options={"bucket_bytes": 1}
    ),
    "muon": Schedule(muon={}),
    "muon, gradients to owners": Schedule(muon=_OWNERS),
    "muon, gradients to owners, partial sums": Schedule(muon=_OWNERS, micro_batches=3, before=_all_reduce_at_the_end),
}


@dataclass
class Run:
    """What a run did.

    Attributes:
        faults: By `happens_before.check`.
        entries: Length of the log.
        crossings: Collectives between supernodes.
        to_owners: Those of them that leave sums on one replica alone.
        waits: Counted ones, by cause.
        seconds: Of all of them, in the time of the device.
        launches: Collectives of this rank, all groups together.
        host_waits: How often the host waited for the device in backward, before its end.
    """

    faults: list[Fault]
    entries: int
    crossings: int
    to_owners: int
    waits: dict[str, int]
    seconds: float
    launches: int
    host_waits: int


def run_alone(name: str, *, events_are_pending: bool = True, tamper: Callable[[], Any] | None = None) -> Run:
    """Trains as `SCHEDULES[name]` says and checks the log of the last steps.

    Args:
        name: The schedule.
        events_are_pending: What a query of an event answers.
        tamper: Makes a context in which everything runs: a fault in the code under test.
    """
    schedule = SCHEDULES[name]
    coalesced = {HCCL_COALESCED_VARIABLE: str(int(schedule.coalesces))}
    with mock.patch.dict(os.environ, coalesced), (tamper or contextlib.nullcontext)():
        return _run(schedule, events_are_pending)


def _run(schedule: Schedule, events_are_pending: bool) -> Run:
    extension = device.extension()
    extension.set_events_pending(events_are_pending)
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("npu", (schedule.replicate, schedule.shard), mesh_dim_names=names)
    torch.manual_seed(0)
    model: Any = Model(checkpoints=schedule.checkpoints).to("npu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **schedule.options)
    if schedule.muon is None:
        optimizer: Any = HyperAdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = HyperMuon(model, lr=1e-3, **schedule.muon)
    _train(schedule, model, optimizer, steps=_STEPS)
    model.fsdp_counters().reset()
    extension.start_log()
    with _marked_waits():
        _train(schedule, model, optimizer, steps=_STEPS)
    log = extension.stop_log()
    inter = _inter_streams(mesh, schedule)
    counters = model.fsdp_counters()
    waits = {cause: wait.count for cause, wait in counters.waits.items()}
    seconds = sum(wait.seconds for wait in counters.waits.values())
    crossings, to_owners = counters.all_reduces, counters.owner_reductions
    faults = happens_before.check(log, inter=inter)
    backends = {backend.stream for backend in device.BACKENDS.values()}
    launches = sum(kind == "record" and stream in backends for kind, stream, *_ in log)
    return Run(faults, len(log), crossings, to_owners, waits, seconds, launches, _host_waits(log))


def _host_waits(log: list[happens_before.Entry]) -> int:
    count, is_backward = 0, False
    for kind, *_, name in log:
        if kind == "mark":
            is_backward = name == happens_before.BACKWARD or (is_backward and name != happens_before.END_OF_BACKWARD)
        count += is_backward and kind.startswith("host waits")
    return count


def _train(schedule: Schedule, model: Any, optimizer: Any, *, steps: int) -> None:
    mark = device.extension().mark
    for _ in range(steps):
        for micro_batch in range(schedule.micro_batches):
            schedule.before(model, micro_batch)
            loss = model(torch.arange(16, device="npu")).float().square().mean()
            mark(happens_before.BACKWARD)
            with contextlib.suppress(BackwardFailedError):
                loss.backward()
            mark(happens_before.END_OF_BACKWARD)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _inter_streams(mesh: DeviceMesh, schedule: Schedule) -> set[int]:
    if schedule.replicate == 1:
        return set()
    return {device.BACKENDS[mesh.get_group("dp_replicate").group_name].stream}


@contextlib.contextmanager
def _marked_waits() -> Iterator[None]:
    """Writes into the log where a counted wait for the window begins and ends, and where backward waits at its end."""
    mark, original = device.extension().mark, Counters.waiting

    @contextlib.contextmanager
    def waiting(self: Counters, cause: WaitCause) -> Iterator[None]:
        if cause is WaitCause.END_OF_BACKWARD:
            mark(happens_before.END_OF_BACKWARD)
        with original(self, cause):
            if cause is WaitCause.WINDOW:
                mark(happens_before.WINDOW)
            try:
                yield
            finally:
                if cause is WaitCause.WINDOW:
                    mark(happens_before.RESUME)

    Counters.waiting = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Counters.waiting = original  # type: ignore[method-assign]
