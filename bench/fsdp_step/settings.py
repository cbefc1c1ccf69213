"""What `settings.yaml` may say: sizes, rounds, variants with their options, and what a sweep tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from bench.settings import read_settings

SETTINGS_FILE = Path(__file__).with_name("settings.yaml")
SWEEP_FILE = Path(__file__).with_name("sweep.json")
OURS = "hyperfsdp"
OURS_C10D = "ours_c10d"
"""Ours with the c10d transport, whatever transport ours has."""
OURS_ALIASED = "ours_aliased"
"""Ours with shards that are slices of the shared parameters, so on shared memory."""
FLOOR = "floor"
MOST_RESIDENT = 5
"""Variants in one set of processes; more would page, and every variant would see another machine."""

Compute = Literal["modelled", "real"]
Transport = Literal["auto", "c10d", "shm"]
Options = dict[str, Any]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Size(_Strict):
    """Sizes of the model and its batch."""

    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    vocabulary: PositiveInt
    tokens: PositiveInt

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Size:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self


class Balance(_Strict):
    """Compute over the wire time of the sharded gradients."""

    name: str
    compute_over_wire: PositiveFloat


class Run(_Strict):
    """How much is run.

    Attributes:
        size: of the model.
        rounds: rounds that must be kept.
        steps: steps of a variant in a round.
        warm_up: steps of each variant before anything is measured.
        equality_steps: steps over which losses and gradient norms are compared under real compute.
        balances: names of those that are run.
        sets: names of those that are run.
    """

    size: Size
    rounds: PositiveInt
    steps: PositiveInt
    warm_up: PositiveInt
    equality_steps: PositiveInt
    balances: list[str]
    sets: list[str]


class VariantSettings(_Strict):
    """One variant.

    Attributes:
        options: those in force, the best of the recorded sweep.
        sweep: what the sweep tries; empty: there is nothing to choose.
    """

    options: Options = Field(default_factory=dict)
    sweep: list[Options] = Field(default_factory=list)


class Settings(_Strict):
    """The whole file.

    Attributes:
        full, quick: what is run without and with `--quick`.
        balances: compute against wire.
        balance_tolerance: relative; rounds further off are rejected and replaced.
        delayed_balance_tolerance: the same where the link has a delay: the program that carries it has its own jitter.
        equality_tolerance: relative, for losses and gradient norms.
        seed, learning_rate, weight_decay: of the training.
        sets: name -> variants that run in one set of processes, beside the floor and ours.
        variants: by name.
        delayed: name -> options instead of those of `variants`, where the link has a delay.
    """

    full: Run
    quick: Run
    balances: list[Balance]
    balance_tolerance: PositiveFloat
    delayed_balance_tolerance: PositiveFloat
    equality_tolerance: PositiveFloat
    seed: int
    learning_rate: PositiveFloat
    weight_decay: float
    sets: dict[str, list[str]]
    variants: dict[str, VariantSettings]
    delayed: dict[str, Options] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_exist(self) -> Settings:
        known = {balance.name for balance in self.balances}
        for run in (self.full, self.quick):
            _refuse_unknown("balance", run.balances, known)
            _refuse_unknown("set", run.sets, set(self.sets))
        for name in (FLOOR, OURS, OURS_C10D, OURS_ALIASED):
            _refuse_unknown("variant", [name], set(self.variants))
        for members in self.sets.values():
            _refuse_unknown("variant", members, set(self.variants))
            if len(members) + 2 > MOST_RESIDENT:
                raise ValueError(f"the set {members} makes {len(members) + 2} resident variants, at most 5 are allowed")
        _refuse_unknown("variant", list(self.delayed), set(self.variants))
        return self

    def options_of(self, variant: str, *, delay_ms: float) -> Options:
        """Options in force for `variant`."""
        if delay_ms > 0 and variant in self.delayed:
            return self.delayed[variant]
        return self.variants[variant].options


def load(path: Path = SETTINGS_FILE) -> Settings:
    """Read and check the settings.

    Raises:
        UnavailableError: the file holds an unknown key or an impossible value.
    """
    return read_settings(Settings, path)


def _refuse_unknown(kind: str, names: list[str], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{kind} {unknown[0]!r} is not defined; known are {sorted(known)}")
