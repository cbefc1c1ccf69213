"""What a rank does: builds the variants, checks them, and times them in interleaved rounds.

`python -m bench.fsdp_step.worker JOB`, as a rank of a testbed. Progress is printed by rank 0.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import paired
from bench.fsdp_step import peers
from bench.fsdp_step.calibration import corrected_layer, drift, most_attempts
from bench.fsdp_step.job import Equality, Job, Result, Round
from bench.fsdp_step.model import make_batches, unit_sizes
from bench.fsdp_step.pace import Pace
from bench.fsdp_step.settings import FLOOR, Balance
from bench.fsdp_step.traffic import count_link
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant

_BATCHES = 16
_CALIBRATIONS = 5
_CALIBRATED = 0.01  # relative difference at which the layer time is good enough


def run_job(job: Job) -> Result:
    """Do all of `job`; every rank must call, after the default process group exists. Equal on all ranks but facts."""
    return _Worker(job).run()


@dataclass
class _Resident:
    """A variant that was built, and where it is in its data."""

    variant: Variant
    steps: int = 0


@dataclass
class _Worker:
    job: Job
    pace: Pace | None = None
    result: Result = field(default_factory=Result)
    residents: dict[str, _Resident] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job, local = self.job, int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(1)
        shape = (dist.get_world_size() // local, local)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        self.pace = Pace() if job.compute == "modelled" else None
        self.context = Context(
            mesh=mesh,
            size=job.size,
            pace=self.pace,
            seed=job.seed,
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
        )
        self.batches = make_batches(job.size, rank=dist.get_rank(), seed=job.seed, count=_BATCHES)
        sizes = unit_sizes(job.size)
        self.result.unit_sizes, self.result.parameters = sizes, sum(sizes)
        self.shards = [torch.zeros(size // local) for size in sizes]

    # ---- the whole job ----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Build, check, measure."""
        for entry in self.job.variants:
            try:
                built = peers.build(entry.kind, self.context, entry.options)
            except PeerUnavailableError as error:
                self.result.unavailable[entry.name] = str(error)
                continue
            self.residents[entry.name] = _Resident(built)
        for name in self.residents:
            self._check(name)
        self._require_equal_waits()
        say(f"built and checked: {', '.join(self.residents)}")
        for name in self.residents:
            for _ in range(self.job.warm_up):
                self._step(name)
        for balance in self.job.balances if self.pace else [Balance(name="real", compute_over_wire=1.0)]:
            self.result.rounds[balance.name] = self._measure(balance)
        for name, resident in self.residents.items():
            self.result.facts[name] = {**self.result.facts[name], **resident.variant.facts()}
        return self.result

    def _step(self, name: str) -> torch.Tensor:
        resident = self.residents[name]
        return resident.variant.step(self._next_batch(resident))

    def _next_batch(self, resident: _Resident) -> tuple[torch.Tensor, torch.Tensor]:
        resident.steps += 1
        return self.batches[(resident.steps - 1) % _BATCHES]

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check(self, name: str) -> None:
        """First steps of a variant: what it computes, how often it waits, what is in force."""
        resident = self.residents[name]
        losses, norms = [], []
        for _ in range(self.job.equality_steps):
            if self.pace is not None:
                self.pace.layer_s = 1e-4
                self.pace.reset()
            loss = resident.variant.forward(self._next_batch(resident))
            resident.variant.backward(loss)
            norms.append(resident.variant.gradient_norm())
            resident.variant.update()
            losses.append(mean_over_ranks(loss.item()))
            if self.pace is not None:
                self.result.waits[name] = (self.pace.calls, round(self.pace.seconds / self.pace.layer_s, 6))
        self.result.equality[name] = Equality(losses=losses, norms=norms)
        self.result.facts[name] = resident.variant.facts()

    def _require_equal_waits(self) -> None:
        if len(set(self.result.waits.values())) > 1:
            raise RuntimeError(
                f"the compute floor is not the same for all variants: waits per step {self.result.waits}"
            )

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, balance: Balance) -> list[Round]:
        rounds: list[Round] = []
        self._calibrate(balance)
        for attempt in range(most_attempts(self.job.rounds)):
            rounds.append(self._round(balance, attempt))
            say(_describe(balance, rounds, self.job.rounds))
            if sum(one.kept for one in rounds) == self.job.rounds:
                break
            self._recalibrate(balance, rounds)
        return rounds

    def _calibrate(self, balance: Balance) -> None:
        if self.pace is None:
            return
        wire = statistics.median(self._wire() for _ in range(3))
        for _ in range(_CALIBRATIONS):
            floor = self._block(FLOOR, max(2, self.job.steps)).seconds
            target = balance.compute_over_wire * wire
            if abs(floor - target) <= _CALIBRATED * target:
                break
            self._correct(balance, floor, wire)
        say(f"{balance.name}: wire {wire * 1e3:.0f} ms, layer {self.pace.layer_s * 1e3:.2f} ms")

    def _correct(self, balance: Balance, floor: float, wire: float) -> None:
        assert self.pace is not None
        target = balance.compute_over_wire * wire
        layers = self.job.size.layers
        self.pace.layer_s = corrected_layer(self.pace.layer_s, floor_s=floor, target_s=target, layers=layers)

    def _recalibrate(self, balance: Balance, rounds: list[Round]) -> None:
        """Follows a drift of the machine; one slow round is none."""
        if self.pace is None:
            return
        off = [
            one.times[FLOOR] - balance.compute_over_wire * one.wire for one in rounds if one.layer == self.pace.layer_s
        ]
        if (excess := drift(off, rejected=[not one.kept for one in rounds][-len(off) :])) is not None:
            self._correct(balance, rounds[-1].wire * balance.compute_over_wire + excess, rounds[-1].wire)

    def _round(self, balance: Balance, attempt: int) -> Round:
        wires = [self._wire()]
        times, cpu, sent, packets = {}, {}, {}, {}
        phases = (0.0, 0.0, 0.0)
        for name in paired.order(list(self.residents), attempt):
            before = count_link()
            if name == FLOOR:
                took, phases = self._floor_block()
            else:
                took = self._block(name, self.job.steps)
            crossed = count_link() - before
            times[name], cpu[name] = took.seconds, took.host_cpu
            sent[name] = mean_over_ranks(crossed.payload / self.job.steps)
            packets[name] = mean_over_ranks(crossed.packets / self.job.steps)
        wires.append(self._wire())
        wire, tolerance = statistics.mean(wires), self.job.balance_tolerance
        ratio = times[FLOOR] / wire if wire > 0 else 0.0
        kept = tolerance is None or paired.in_balance(ratio, balance.compute_over_wire, tolerance=tolerance)
        return Round(
            kept=kept,
            wire=wire,
            layer=self.pace.layer_s if self.pace is not None else 0.0,
            floor_phases=phases,
            times=times,
            host_cpu=cpu,
            link_bytes=sent,
            packets=packets,
        )

    def _block(self, name: str, steps: int) -> _Took:
        """What a step takes, over `steps` steps between two barriers."""

        def work() -> None:
            for _ in range(steps):
                self._step(name)

        return _timed(work).per_step(steps)

    def _floor_block(self) -> tuple[_Took, tuple[float, float, float]]:
        """As `_block`, of the floor, and its time in forward, backward and update."""
        resident = self.residents[FLOOR]
        phases = [0.0, 0.0, 0.0]

        def work() -> None:
            for _ in range(self.job.steps):
                moments = [time.perf_counter()]
                loss = resident.variant.forward(self._next_batch(resident))
                moments.append(time.perf_counter())
                resident.variant.backward(loss)
                moments.append(time.perf_counter())
                resident.variant.update()
                moments.append(time.perf_counter())
                for index in range(3):
                    phases[index] += (moments[index + 1] - moments[index]) / self.job.steps

        took = _timed(work).per_step(self.job.steps)
        return took, (mean_over_ranks(phases[0]), mean_over_ranks(phases[1]), mean_over_ranks(phases[2]))

    def _wire(self) -> float:
        """Seconds of an all-reduce of all gradient shards between supernodes, all shards at once."""
        if self.job.nominal_wire_s is not None:
            return self.job.nominal_wire_s

        def work() -> None:
            group = self.context.inter_group
            for pending in [dist.all_reduce(shard, group=group, async_op=True) for shard in self.shards]:
                pending.wait()

        return _timed(work).seconds


@dataclass(frozen=True)
class _Took:
    """What some work took, in seconds.

    Attributes:
        seconds: elapsed, of the slowest rank.
        host_cpu: of the CPUs, user and system, all threads of all ranks together.
    """

    seconds: float
    host_cpu: float

    def per_step(self, steps: int) -> _Took:
        return _Took(self.seconds / steps, self.host_cpu / steps)


def _timed(work: Callable[[], None]) -> _Took:
    """Runs `work` between two barriers, which are not counted. Every rank must call."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), cpu_seconds()
    work()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    dist.barrier()
    return _Took(most_over_ranks(seconds), mean_over_ranks(cpu) * dist.get_world_size())


def cpu_seconds() -> float:
    """CPU time of this process so far, user and system, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def most_over_ranks(value: float) -> float:
    """The largest of all ranks' values. Every rank must call."""
    return _reduced(value, dist.ReduceOp.MAX)


def mean_over_ranks(value: float) -> float:
    """The mean of all ranks' values. Every rank must call."""
    return _reduced(value, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return tensor.item()


def _describe(balance: Balance, rounds: list[Round], wanted: int) -> str:
    last = rounds[-1]
    times = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in last.times.items())
    kept = sum(one.kept for one in rounds)
    verdict = "" if last.kept else ", rejected"
    ratio = last.times[FLOOR] / last.wire if last.wire > 0 else 0.0
    return (
        f"{balance.name}: {kept}/{wanted} rounds kept; wire {last.wire * 1e3:.0f} ms, "
        f"compute/wire {ratio:.3f}{verdict}; step ms: {times}"
    )


def say(message: str) -> None:
    """Progress, printed by rank 0."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def prepare(job: Job) -> None:
    """What must happen before the process group exists and Megatron is imported."""
    if any(entry.kind in peers.NEEDS_MEGATRON for entry in job.variants):
        from bench.fsdp_step.peers import megatron

        megatron.prepare()


def main(text: str) -> None:
    """A rank's whole life."""
    from bench.testbed import worker

    job = Job.model_validate_json(text)
    prepare(job)
    with worker.gloo():
        result = run_job(job)
        if dist.get_rank() == 0:
            worker.publish(result.model_dump(mode="json"))


if __name__ == "__main__":
    main(sys.argv[1])
