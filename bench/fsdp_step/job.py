"""What the command asks of a set of processes, and what it gets back; both travel as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bench.fsdp_step.settings import Balance, Compute, Options, Size


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VariantJob(_Plain):
    """One variant: `name` in the results, `kind` of its builder, its options."""

    name: str
    kind: str
    options: Options = Field(default_factory=dict)


class Job(_Plain):
    """The work of one set of processes.

    Attributes:
        size: of the model.
        compute: "modelled" or "real".
        variants: what is resident, in the order of even rounds. The first is the floor.
        balances: compute against wire, one after another. Ignored under real compute.
        rounds: rounds to keep of each balance.
        steps: steps of a variant in a round.
        warm_up: steps of each variant before anything is measured.
        equality_steps: steps of which losses and gradient norms are recorded before that.
        balance_tolerance: rounds further off are rejected; None: none is.
        nominal_wire_s: wire time that balances refer to where there is no shaped link to measure; None: measure.
        seed, learning_rate, weight_decay: of the training.
    """

    size: Size
    compute: Compute
    variants: list[VariantJob]
    balances: list[Balance]
    rounds: int
    steps: int
    warm_up: int
    equality_steps: int
    balance_tolerance: float | None
    nominal_wire_s: float | None
    seed: int
    learning_rate: float
    weight_decay: float


class Round(_Plain):
    """One round. Times are seconds, means over ranks.

    Attributes:
        kept: whether the balance was right.
        wire: all-reduce of all gradient shards between supernodes, or the nominal time.
        layer: modelled forward of a layer.
        floor_phases: of the floor: forward, backward, update.
        times: a step, by variant.
        host_cpu: CPU time of a step, user and system, all threads of all ranks together, by variant.
        link_bytes: payload that a supernode sent per step, by variant, mean over supernodes.
        packets: packets of the same.
    """

    kept: bool
    wire: float
    layer: float
    floor_phases: tuple[float, float, float]
    times: dict[str, float]
    host_cpu: dict[str, float]
    link_bytes: dict[str, float]
    packets: dict[str, float]


class Equality(_Plain):
    """Of one variant, by step: mean loss over ranks, norm of the whole gradient."""

    losses: list[float]
    norms: list[float]


class Result(_Plain):
    """What rank 0 hands back.

    Attributes:
        unavailable: variant -> why it did not run.
        equality: variant -> what it computed in its first steps.
        waits: variant -> (number, seconds in layers) of modelled waits per step; equal for all, or the run fails.
        facts: variant -> what was in force.
        rounds: balance -> its rounds, the rejected included.
        link: whether there was a link to measure.
    """

    unavailable: dict[str, str] = Field(default_factory=dict)
    equality: dict[str, Equality] = Field(default_factory=dict)
    waits: dict[str, tuple[int, float]] = Field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rounds: dict[str, list[Round]] = Field(default_factory=dict)
    parameters: int = 0
    unit_sizes: list[int] = Field(default_factory=list)
