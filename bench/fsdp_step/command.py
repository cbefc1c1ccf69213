"""`python -m bench fsdp-step`: chooses what runs, runs each set of variants on a testbed of its own, reports."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from bench.errors import BenchError, UnavailableError
from bench.fsdp_step import results, sweep
from bench.fsdp_step.calibration import most_attempts
from bench.fsdp_step.job import Job, Result, VariantJob
from bench.fsdp_step.model import unit_sizes
from bench.fsdp_step.peers import ABLATIONS, ON_C10D
from bench.fsdp_step.settings import (
    FLOOR,
    OURS,
    OURS_ALIASED,
    OURS_C10D,
    Compute,
    Options,
    Run,
    Settings,
    Transport,
    load,
)
from bench.report import Report, say
from bench.testbed import DelayOption, LinkOption, RanksFailedError, Testbed, parse_rate

_NOMINAL_MBIT = 1000.0  # where no shaped link can be measured, compute is set against a link of this rate
_START_S = 180.0  # limit for starting and building a set
_MADE_OF_OURS = frozenset({OURS, OURS_C10D, OURS_ALIASED, *ABLATIONS})
_STEP_S = 4.0  # limit for a step at 1 Gbit/s, far above what any takes

TransportOption = Annotated[str, typer.Option("--transport", help="Of ours inside a supernode: auto, c10d or shm.")]
ComputeOption = Annotated[str, typer.Option("--compute", help="modelled (for times) or real (for equality).")]
ShapeOption = Annotated[str, typer.Option("--supernodes", help="Supernodes x ranks in each: 2x2, 4x1, 1x4.")]
PeersOption = Annotated[str, typer.Option("--peers", help="Only these peers or ablations, by name, with commas.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Rounds to keep of each balance; 0: as in settings.yaml.")]
BalancesOption = Annotated[str, typer.Option("--balances", help="Only these balances: c1, c2, or c1,c2.")]
SweepOption = Annotated[bool, typer.Option("--sweep", help="Try each peer's options instead; writes sweep.json.")]


@dataclass(frozen=True)
class Plan:
    """What the options of the command line ask for."""

    settings: Settings
    run: Run
    transport: Transport
    compute: Compute
    supernodes: int
    ranks: int
    rate_mbit: float | None
    delay_ms: float

    @property
    def is_balanced(self) -> bool:
        """Whether there is a shaped link against which rounds are held."""
        return self.compute == "modelled" and self.supernodes > 1 and self.rate_mbit is not None

    @property
    def balance_tolerance(self) -> float | None:
        """Rounds further off are rejected; None: there is nothing to hold them against."""
        if not self.is_balanced:
            return None
        return self.settings.delayed_balance_tolerance if self.delay_ms > 0 else self.settings.balance_tolerance

    def job(self, variants: list[VariantJob], *, rounds: int, balances: list[str]) -> Job:
        """The work of one set of processes."""
        own = self.settings
        nominal = 4 * sum(unit_sizes(self.run.size)) * 8 / (_NOMINAL_MBIT * 1e6)
        return Job(
            size=self.run.size,
            compute=self.compute,
            variants=variants,
            balances=[balance for balance in own.balances if balance.name in balances],
            rounds=rounds,
            steps=self.run.steps,
            warm_up=self.run.warm_up,
            equality_steps=self.run.equality_steps,
            balance_tolerance=self.balance_tolerance,
            nominal_wire_s=None if self.is_balanced or (self.compute == "real" and self.supernodes > 1) else nominal,
            seed=own.seed,
            learning_rate=own.learning_rate,
            weight_decay=own.weight_decay,
        )

    def variant(self, name: str) -> VariantJob:
        """A variant with the options in force; what is made of ours has those of ours."""
        source = OURS if name in _MADE_OF_OURS else name
        options = self.settings.options_of(source, delay_ms=self.delay_ms)
        return VariantJob(name=name, kind=name, options=self.in_force(name, options))

    def in_force(self, name: str, options: Options) -> Options:
        """`options` of a variant, with the transport if it is made of ours."""
        if name not in _MADE_OF_OURS:
            return options
        if name == OURS_ALIASED:
            return {"transport": "shm", "residence": "aliased", **options}
        return {"transport": "c10d" if name in (OURS_C10D, *ON_C10D) else self.transport, **options}

    def execute(self, job: Job) -> Result:
        """Run `job` on a testbed of its own; progress goes to standard error."""
        slower = max(1.0, 1000.0 / self.rate_mbit) if self.rate_mbit else 1.0
        blocks = max(1, len(job.balances)) * most_attempts(job.rounds) * len(job.variants)
        limit = _START_S + blocks * (job.steps + 1) * _STEP_S * slower
        command = [sys.executable, "-m", "bench.fsdp_step.worker", job.model_dump_json()]
        testbed = Testbed(
            supernodes=self.supernodes,
            ranks_per_supernode=self.ranks,
            rate_mbit=self.rate_mbit,
            delay_ms=self.delay_ms,
        )
        with testbed, contextlib.redirect_stdout(sys.stderr):
            ended = testbed.run(command, timeout=limit)
        return Result.model_validate(ended[0].value)

    def describe(self) -> dict[str, Any]:
        """For the report's environment."""
        return {
            "compute": self.compute,
            "supernodes": self.supernodes,
            "ranks_per_supernode": self.ranks,
            "rate_mbit": self.rate_mbit,
            "delay_ms": self.delay_ms,
            "transport_asked_for": self.transport,
            "settings": self.run.model_dump(mode="json"),
            "balance_tolerance": self.balance_tolerance,
            "not_built": ["no_two_tier_optimizer"],
        }


def benchmark(
    *,
    quick: bool = False,
    transport: TransportOption = "auto",
    compute: ComputeOption = "modelled",
    link: LinkOption = "1gbit",
    delay: DelayOption = 0.0,
    supernodes: ShapeOption = "2x2",
    peers: PeersOption = "",
    balances: BalancesOption = "",
    rounds: RoundsOption = 0,
    sweep_options: SweepOption = False,
) -> Report:
    """A training step over a slow link: ours against the peers' real classes, all in one run.

    Args:
        quick: a smaller run.
        transport: how ours moves bytes inside a supernode.
        compute: whether layers wait as an accelerator would, or compute.
        link: rate of each supernode's link.
        delay: its one-way delay in ms.
        supernodes: shape of the testbed.
        peers: names of those that run; empty: all.
        balances: names of those that run; empty: all.
        rounds: rounds to keep; 0: as in the settings.
        sweep_options: measure the options of each peer instead of the comparison.
    """
    plan = _plan(quick, transport, compute, link, delay, supernodes)
    if sweep_options:
        return sweep.run_sweep(plan, only=_names(peers))
    sets = _chosen_sets(plan, _names(peers))
    names = _names(balances) or plan.run.balances
    if unknown := set(names) - {balance.name for balance in plan.settings.balances}:
        raise UnavailableError(f"--balances {sorted(unknown)[0]!r} is not defined in settings.yaml")
    kept = rounds or plan.run.rounds
    found: dict[str, tuple[Job, Result]] = {}
    failures: dict[str, str] = {}
    for set_name, members in sets.items():
        say(f"fsdp-step: set {set_name}: {', '.join(members)}")
        ours_alone = set(members) <= _MADE_OF_OURS and not balances
        chosen = names[:1] if ours_alone else names  # what a mechanism is worth is asked at the first balance
        job = plan.job([plan.variant(name) for name in [FLOOR, OURS, *members]], rounds=kept, balances=chosen)
        try:
            found[set_name] = (job, plan.execute(job))
        except RanksFailedError as error:
            say(f"error: set {set_name}: {error}")
            failures[set_name] = str(error).splitlines()[0]
    if not found:
        raise BenchError(f"no set of variants ran to its end: {failures}; their messages are above")
    return results.make_report(plan, found, failures)


def _plan(quick: bool, transport: str, compute: str, link: str, delay: float, shape: str) -> Plan:
    if transport not in get_args(Transport):
        raise UnavailableError(f"--transport {transport!r} is unknown; use {', '.join(get_args(Transport))}")
    if compute not in ("modelled", "real"):
        raise UnavailableError(f"--compute {compute!r} is unknown; use modelled or real")
    found = re.fullmatch(r"(\d+)x(\d+)", shape)
    if not found or 0 in (sizes := [int(word) for word in found.groups()]):
        raise UnavailableError(f"--supernodes {shape!r} is not a shape; write supernodes x ranks, such as 2x2")
    own = load()
    run = own.quick if quick else own.full
    return Plan(own, run, transport, compute, sizes[0], sizes[1], parse_rate(link), delay)  # type: ignore[arg-type]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen_sets(plan: Plan, only: list[str]) -> dict[str, list[str]]:
    known = {name for members in plan.settings.sets.values() for name in members}
    if unknown := [name for name in only if name not in known]:
        raise UnavailableError(f"--peers {unknown[0]!r} is unknown; known are {', '.join(sorted(known))}")
    if only:  # also from sets that are not run by themselves
        candidates = plan.settings.sets
    else:
        candidates = {name: plan.settings.sets[name] for name in plan.run.sets}
    wanted = {*only, *([OURS_C10D] if set(only) & set(ON_C10D) else [])}  # what those are held against
    chosen = {key: [name for name in members if not only or name in wanted] for key, members in candidates.items()}
    return {key: members for key, members in chosen.items() if members}
