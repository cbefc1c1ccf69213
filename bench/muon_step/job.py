"""What the command asks of a set of processes, and what it gets back; both travel as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bench.fsdp_step.job import VariantJob
from bench.fsdp_step.settings import Size
from bench.muon_step.settings import AdamWSettings, MuonSettings


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Job(_Plain):
    """The work of one set of processes.

    Attributes:
        size: of the model.
        variants: what is resident, in the order of even rounds. The first is what the others are compared with.
        muon, adamw: hyperparameters, the same for all.
        rounds: rounds to keep.
        steps: steps of a variant in a round.
        warm_up: steps of each variant before anything is measured.
        equality_steps: steps of real compute before that, after which weights are compared.
        equality_tokens: of each rank in those.
        compute_over_wire: modelled compute of a step over the wire time.
        wire_tolerance: rounds in which the wire time changed by more are rejected; None: none is.
        nominal_wire_s: wire time where there is no shaped link to measure; None: measure.
        seed: of weights and data.
    """

    size: Size
    variants: list[VariantJob]
    muon: MuonSettings
    adamw: AdamWSettings
    rounds: int
    steps: int
    warm_up: int
    equality_steps: int
    equality_tokens: int
    compute_over_wire: float
    wire_tolerance: float | None
    nominal_wire_s: float | None
    seed: int


class Round(_Plain):
    """One round. Times are seconds of a step, of the slowest rank, by variant.

    Attributes:
        kept: whether the wire time stayed what it was.
        wire: all-reduce of all gradient shards between supernodes, before and after, or the nominal time twice.
        windows: from the last gradient of a matrix until the first layer of the next forward begins.
        times: the whole step.
        host_cpu: CPU time, user and system, all threads of all ranks together.
        link_bytes: payload that a supernode sent, mean over supernodes.
    """

    kept: bool
    wire: tuple[float, float]
    windows: dict[str, float]
    times: dict[str, float]
    host_cpu: dict[str, float]
    link_bytes: dict[str, float]


class Equality(_Plain):
    """What one variant computed in its first steps.

    Attributes:
        losses: mean over ranks, by step.
        difference: largest relative difference of a weight's change to that of the first variant, in norm, over
            weights and ranks.
        parameter: of which weight.
    """

    losses: list[float]
    difference: float
    parameter: str


class Result(_Plain):
    """What rank 0 hands back.

    Attributes:
        unavailable: variant -> why it did not run.
        equality: variant -> what it computed.
        facts: variant -> what was in force.
        rounds: all of them, the rejected included.
        counters: what ours counted in its last step, one entry for each rank.
        parameters: elements of the model.
    """

    unavailable: dict[str, str] = Field(default_factory=dict)
    equality: dict[str, Equality] = Field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rounds: list[Round] = Field(default_factory=list)
    counters: list[dict[str, Any]] = Field(default_factory=list)
    parameters: int = 0
