"""What a rank does: builds the variants, checks that they train alike, and times them in interleaved rounds.

`python -m bench.muon_step.worker JOB`, as a rank of a testbed. Progress is printed by rank 0.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import paired
from bench.fsdp_step.calibration import most_attempts
from bench.fsdp_step.model import make_batches, make_model, unit_sizes
from bench.fsdp_step.traffic import count_link
from bench.fsdp_step.variant import Batch, PeerUnavailableError
from bench.fsdp_step.worker import cpu_seconds, mean_over_ranks, most_over_ranks, say
from bench.muon_step import peers
from bench.muon_step.job import Equality, Job, Result, Round
from bench.muon_step.variant import MarkedPace, MuonContext, MuonVariant

_BATCHES = 16
_WAITS_PER_LAYER = 3  # a forward and a backward of twice its time
_LONGEST_WAIT_S = 600.0  # for a peer that compiles in its first step


def run_job(job: Job) -> Result:
    """Do all of `job`; every rank must call, after the default process group exists."""
    return _Worker(job).run()


@dataclass
class _Resident:
    """A variant that was built, and where it is in its data."""

    variant: MuonVariant
    steps: int = 0


@dataclass
class _Worker:
    job: Job
    pace: MarkedPace = field(default_factory=MarkedPace)
    result: Result = field(default_factory=Result)
    residents: dict[str, _Resident] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job, local = self.job, int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(1)
        shape = (dist.get_world_size() // local, local)
        self.context = MuonContext(
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")),
            size=job.size,
            pace=self.pace,
            seed=job.seed,
            learning_rate=job.adamw.lr,
            weight_decay=job.adamw.weight_decay,
            muon=job.muon,
            adam=job.adamw,
        )
        self.batches = make_batches(job.size, rank=dist.get_rank(), seed=job.seed, count=_BATCHES)
        longer = job.size.model_copy(update={"tokens": job.equality_tokens})
        self.real_batches = make_batches(longer, rank=dist.get_rank(), seed=job.seed, count=job.equality_steps)
        sizes = unit_sizes(job.size)
        self.result.parameters = sum(sizes)
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
        if self.job.variants[0].name not in self.residents:
            return self.result  # there is nothing to compare with
        self._check()
        for name in self.residents:
            for _ in range(self.job.warm_up):
                self._step(name)
            say(f"warmed up: {name}")
        self._measure()
        for name, resident in self.residents.items():
            self.result.facts[name] = resident.variant.facts()
        first = self.residents[self.job.variants[0].name].variant
        counters: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(counters, first.counters())
        self.result.counters = [each for each in counters if each]
        return self.result

    def _step(self, name: str) -> float:
        """One step; returns seconds from the last gradient before it until its first layer began."""
        resident = self.residents[name]
        self.pace.new_step()
        resident.variant.step(self._next_batch(resident))
        return self.pace.still_s

    def _next_batch(self, resident: _Resident) -> Batch:
        resident.steps += 1
        return self.batches[(resident.steps - 1) % _BATCHES]

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Trains every variant with real compute, and compares what became of the weights."""
        start = dict(make_model(self.job.size, None, seed=self.job.seed).named_parameters())
        wanted: dict[str, torch.Tensor] = {}
        for name, resident in self.residents.items():
            resident.variant.set_pace(None)
            losses = [_real_step(resident.variant, batch) for batch in self.real_batches]
            resident.variant.set_pace(self.pace)
            largest, where = 0.0, ""
            for key, weight in resident.variant.full_weights():
                change = weight - start[key].detach()
                if name == self.job.variants[0].name:
                    wanted[key] = change
                    continue
                off = most_over_ranks(float((change - wanted[key]).norm() / wanted[key].norm()))
                if not off <= largest:  # a NaN is the largest
                    largest, where = off, key
            self.result.equality[name] = Equality(losses=losses, difference=largest, parameter=where)
            say(f"checked: {name}: losses {losses[0]:.5f} to {losses[-1]:.5f}, weights within {largest:.2e} {where}")

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        rounds = self.result.rounds
        for attempt in range(most_attempts(self.job.rounds)):
            rounds.append(self._round(attempt))
            say(_describe(rounds, self.job.rounds))
            if sum(one.kept for one in rounds) == self.job.rounds:
                break

    def _round(self, attempt: int) -> Round:
        job = self.job
        before = self._wire()
        self.pace.layer_s = job.compute_over_wire * before / (_WAITS_PER_LAYER * job.size.layers)
        windows, times, cpu, sent = {}, {}, {}, {}
        for name in paired.order(list(self.residents), attempt):
            link = count_link()
            times[name], windows[name], cpu[name] = self._block(name)
            sent[name] = mean_over_ranks((count_link() - link).payload / job.steps)
        after = self._wire()
        kept = job.wire_tolerance is None or paired.in_balance(after, before, tolerance=job.wire_tolerance)
        return Round(kept=kept, wire=(before, after), windows=windows, times=times, host_cpu=cpu, link_bytes=sent)

    def _block(self, name: str) -> tuple[float, float, float]:
        """Seconds of a step, of its window, and of all CPUs, over the steps of a round between two barriers."""
        steps = self.job.steps
        dist.barrier()
        start, cpu_start = time.perf_counter(), cpu_seconds()
        windows = [self._step(name) for _ in range(steps)]
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
        dist.barrier()
        all_cpus = mean_over_ranks(cpu) * dist.get_world_size()
        window = statistics.mean(windows[1:])  # before the first, other variants ran
        return most_over_ranks(seconds) / steps, most_over_ranks(window), all_cpus / steps

    def _wire(self) -> float:
        """Seconds of an all-reduce of all gradient shards between supernodes, all at once; the median of three."""
        if self.job.nominal_wire_s is not None:
            return self.job.nominal_wire_s
        return statistics.median(self._wire_once() for _ in range(3))

    def _wire_once(self) -> float:
        group = self.context.inter_group
        dist.barrier()
        start = time.perf_counter()
        for pending in [dist.all_reduce(shard, group=group, async_op=True) for shard in self.shards]:
            pending.wait()
        seconds = time.perf_counter() - start
        dist.barrier()
        return most_over_ranks(seconds)


def _real_step(variant: MuonVariant, batch: Batch) -> float:
    """A step; returns its loss, the mean over ranks."""
    loss = variant.forward(batch)
    variant.backward(loss)
    variant.update()
    return mean_over_ranks(loss.item())


def _describe(rounds: list[Round], wanted: int) -> str:
    last = rounds[-1]
    figures = ", ".join(f"{name} {last.windows[name] * 1e3:.0f}/{last.times[name] * 1e3:.0f}" for name in last.times)
    kept = sum(one.kept for one in rounds)
    wire = " and ".join(f"{seconds * 1e3:.0f}" for seconds in last.wire)
    verdict = "" if last.kept else ", rejected"
    return f"{kept}/{wanted} rounds kept; wire {wire} ms{verdict}; window/step ms: {figures}"


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
    with worker.gloo(timeout_s=_LONGEST_WAIT_S):
        result = run_job(job)
        if dist.get_rank() == 0:
            worker.publish(result.model_dump(mode="json"))


if __name__ == "__main__":
    main(sys.argv[1])
