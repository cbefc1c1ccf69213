"""`python -m bench muon-step`: chooses what runs, runs it on a testbed, reports."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench.errors import UnavailableError
from bench.fsdp_step.calibration import most_attempts
from bench.fsdp_step.job import VariantJob
from bench.fsdp_step.model import unit_sizes
from bench.fsdp_step.settings import Options
from bench.muon_step import results, sweep
from bench.muon_step.job import Job, Result
from bench.muon_step.settings import OURS, PEERS, Run, Settings, load
from bench.report import Report
from bench.testbed import LinkOption, Testbed, parse_rate

_SUPERNODES = _RANKS = 2
_NOMINAL_MBIT = 1000.0  # where no shaped link can be measured, compute is set against a link of this rate
_START_S = 300.0  # limit for starting, building and the checks
_STEP_S = 30.0  # limit for a step at 1 Gbit/s, far above what any takes

PeersOption = Annotated[str, typer.Option("--peers", help="Only these peers, by name, with commas.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Rounds to keep; 0: as in settings.yaml.")]
SweepOption = Annotated[bool, typer.Option("--sweep", help="Try each variant's options instead; writes sweep.json.")]


@dataclass(frozen=True)
class Plan:
    """What the options of the command line ask for."""

    settings: Settings
    run: Run
    rate_mbit: float | None

    def job(self, variants: list[VariantJob], *, rounds: int) -> Job:
        """The work of one set of processes."""
        own = self.settings
        nominal = 4 * sum(unit_sizes(self.run.size)) * 8 / (_NOMINAL_MBIT * 1e6)
        return Job(
            size=self.run.size,
            variants=variants,
            muon=own.muon,
            adamw=own.adamw,
            rounds=rounds,
            steps=self.run.steps,
            warm_up=self.run.warm_up,
            equality_steps=self.run.equality_steps,
            equality_tokens=own.equality_tokens,
            compute_over_wire=own.compute_over_wire,
            wire_tolerance=None if self.rate_mbit is None else own.wire_tolerance,
            nominal_wire_s=nominal if self.rate_mbit is None else None,
            seed=own.seed,
        )

    def variant(self, kind: str, *, name: str | None = None, options: Options | None = None) -> VariantJob:
        """A variant with the options in force, or those given."""
        own = self.settings.variants[kind].options if options is None else options
        return VariantJob(name=name or kind, kind=kind, options=own)

    def execute(self, job: Job) -> Result:
        """Run `job` on a testbed of its own; progress goes to standard error."""
        slower = max(1.0, 1000.0 / self.rate_mbit) if self.rate_mbit else 1.0
        steps = job.equality_steps + job.warm_up + most_attempts(job.rounds) * job.steps
        limit = _START_S + len(job.variants) * steps * _STEP_S * slower
        command = [sys.executable, "-m", "bench.muon_step.worker", job.model_dump_json()]
        testbed = Testbed(supernodes=_SUPERNODES, ranks_per_supernode=_RANKS, rate_mbit=self.rate_mbit)
        with testbed, contextlib.redirect_stdout(sys.stderr):
            ended = testbed.run(command, env={"DS_ACCELERATOR": "cpu"}, timeout=limit)
        return Result.model_validate(ended[0].value)

    def describe(self) -> dict[str, Any]:
        """For the report's environment."""
        own = self.settings
        return {
            "supernodes": _SUPERNODES,
            "ranks_per_supernode": _RANKS,
            "rate_mbit": self.rate_mbit,
            "settings": self.run.model_dump(mode="json"),
            "muon": own.muon.model_dump(mode="json"),
            "adamw": own.adamw.model_dump(mode="json"),
            "compute_over_wire": own.compute_over_wire,
            "wire_tolerance": own.wire_tolerance,
        }


def benchmark(
    *,
    quick: bool = False,
    link: LinkOption = "1gbit",
    peers: PeersOption = "",
    rounds: RoundsOption = 0,
    sweep_options: SweepOption = False,
) -> Report:
    """Muon over a slow link: ours against torch on DTensors, Megatron and DeepSpeed, all in one run.

    Args:
        quick: a smaller run.
        link: rate of each supernode's link.
        peers: names of those that run; empty: all.
        rounds: rounds to keep; 0: as in the settings.
        sweep_options: measure the options of each variant instead of the comparison.
    """
    settings = load()
    run = settings.quick if quick else settings.full
    plan = Plan(settings, run, parse_rate(link))
    only = [name.strip() for name in peers.split(",") if name.strip()]
    if unknown := set(only) - {*PEERS, *([OURS] if sweep_options else [])}:
        raise UnavailableError(f"--peers {sorted(unknown)[0]!r} is unknown; known are {', '.join(PEERS)}")
    if sweep_options:
        return sweep.run_sweep(plan, only=only)
    chosen = [OURS, *(name for name in PEERS if not only or name in only)]
    job = plan.job([plan.variant(name) for name in chosen], rounds=rounds or run.rounds)
    return results.make_report(plan, job, plan.execute(job))
