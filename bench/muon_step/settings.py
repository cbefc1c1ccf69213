"""What `settings.yaml` may say: sizes, rounds, hyperparameters, variants with their options, and what a sweep tries."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from bench.fsdp_step.settings import Size, VariantSettings
from bench.settings import read_settings

SETTINGS_FILE = Path(__file__).with_name("settings.yaml")
SWEEP_FILE = Path(__file__).with_name("sweep.json")
OURS = "hypermuon"
PEERS = ("torch_dtensor", "megatron", "deepspeed")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MuonSettings(_Strict):
    """Of the matrices.

    Attributes:
        lr, momentum, weight_decay: as in every Muon; weight decay is decoupled and takes `lr` as it is.
        steps: Newton-Schulz steps.
    """

    lr: PositiveFloat
    momentum: PositiveFloat
    weight_decay: float
    steps: PositiveInt


class AdamWSettings(_Strict):
    """Of all other parameters."""

    lr: PositiveFloat
    beta1: PositiveFloat
    beta2: PositiveFloat
    eps: PositiveFloat
    weight_decay: float


class Run(_Strict):
    """How much is run.

    Attributes:
        size: of the model.
        rounds: rounds that must be kept.
        steps: steps of a variant in a round, at least 2: what is timed lies between two.
        warm_up: steps of modelled compute before anything is measured; those of real compute come before them.
        equality_steps: steps of real compute after which weights are compared, before that.
    """

    size: Size
    rounds: PositiveInt
    steps: int = Field(ge=2)
    warm_up: NonNegativeInt
    equality_steps: PositiveInt


class Settings(_Strict):
    """The whole file.

    Attributes:
        full, quick: what is run without and with `--quick`.
        compute_over_wire: modelled compute of a step over the wire time of the sharded gradients.
        wire_tolerance: relative; a round whose wire time changed by more while it ran is rejected.
        equality_tokens: of each rank while weights are compared.
        equality_tolerance: relative, of the change of each weight in norm.
        loss_tolerance: relative.
        seed: of weights and data.
        muon, adamw: the same for every variant.
        variants: by name.
    """

    full: Run
    quick: Run
    compute_over_wire: PositiveFloat
    wire_tolerance: PositiveFloat
    equality_tokens: PositiveInt
    equality_tolerance: PositiveFloat
    loss_tolerance: PositiveFloat
    seed: int
    muon: MuonSettings
    adamw: AdamWSettings
    variants: dict[str, VariantSettings]

    @model_validator(mode="after")
    def _variants_are_those_that_exist(self) -> Settings:
        if set(self.variants) != {OURS, *PEERS}:
            raise ValueError(f"the variants are {sorted(self.variants)}; expected {sorted({OURS, *PEERS})}")
        return self


def load(path: Path = SETTINGS_FILE) -> Settings:
    """Read and check the settings.

    Raises:
        UnavailableError: the file holds an unknown key or an impossible value.
    """
    return read_settings(Settings, path)
