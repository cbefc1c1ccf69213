"""The options of `--use-hypermuon`: `--hypermuon-*`, or the section `hypermuon:` of `--hyperfsdp-config FILE`.

None of them is called `--muon-*`: Megatron and MindSpeed have flags of these names for optimizers of their own.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.scale import scale_formula
from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.arguments import schema

PREFIX = "--hypermuon-"


def _joined(value: Any) -> Any:
    """A list of a file as the words of the command line: Megatron pickles its arguments, plain values only."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value


Patterns = Annotated[str, BeforeValidator(_joined)]


class HyperMuonOptions(BaseModel):
    """Options of HyperMuon in a Megatron job; the field names are the YAML keys and, with dashes, the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lr: PositiveFloat | None = Field(
        None, title="a positive number", description="largest learning rate of Muon; by default --lr"
    )
    min_lr: NonNegativeFloat | None = Field(
        None,
        title="a number that is not negative",
        description="smallest learning rate of Muon; by default --min-lr, in proportion if --hypermuon-lr is given",
    )
    adam_lr: PositiveFloat | None = Field(
        None, title="a positive number", description="largest learning rate of AdamW; by default --lr"
    )
    adam_min_lr: NonNegativeFloat | None = Field(
        None,
        title="a number that is not negative",
        description="smallest learning rate of AdamW; by default --min-lr, in proportion if --hypermuon-adam-lr is "
        "given",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, title="a number of at least 0 and below 1", description="decay of the momentum"
    )
    nesterov: bool = Field(True, title="true or false", description="whether the gradient counts once more")
    scale: str = Field(
        "adamw_rms",
        title="a formula of hp_plugin.core.muon.scale",
        description="how large an update is: adamw_rms (as AdamW's, so that --lr carries over), clamped_aspect, "
        "max_dim, aspect, none, or library:name such as megatron:spectral",
    )
    extra_scale: PositiveFloat = Field(1.0, title="a positive number", description="a further factor of every update")
    coefficients: str = Field(
        "classic",
        title="a set of hp_plugin.core.muon.coefficients",
        description="polynomial of the Newton-Schulz iteration: classic, quintic5, polar_express5, ..., or "
        "library:name such as megatron:quintic",
    )
    ns_steps: PositiveInt | None = Field(
        None, title="a positive number of steps", description="Newton-Schulz steps; by default those of the set"
    )
    ns_dtype: Literal["bf16", "fp32"] = Field(
        "bf16", title="bf16 or fp32", description="dtype of the iteration, in which matrices also travel"
    )
    exchange: Literal["auto", "a2a", "gather", "gram"] = Field(
        "auto", title="auto, a2a, gather or gram", description="how matrices reach the rank that orthogonalizes them"
    )
    momentum_placement: Literal["replicated", "owner"] = Field(
        "replicated",
        title="replicated or owner",
        description="which replicas keep the momentum of a matrix: all, or the one that orthogonalizes it",
    )
    tensor_parallel: Literal["whole", "blockwise"] = Field(
        "whole",
        title="whole or blockwise",
        description="orthogonalize the matrix of the whole tensor-parallel group, or each rank's part by itself",
    )
    split_qkv: bool = Field(
        True, title="true or false", description="treat queries, keys and values of a fused weight as matrices"
    )
    split_heads: bool = Field(
        False, title="true or false", description="treat every attention head of queries, keys and values as a matrix"
    )
    split_gate_up: bool = Field(
        True, title="true or false", description="treat gate and up of a fused weight as two matrices"
    )
    include: Patterns | None = Field(
        None,
        title="patterns of parameter names, with commas between them",
        description="parameters that Muon trains whatever they are",
    )
    exclude: Patterns | None = Field(
        None,
        title="patterns of parameter names, with commas between them",
        description="parameters that AdamW trains whatever they are",
    )
    start_from: Literal["adam", "fresh"] = Field(
        "adam",
        title="adam or fresh",
        description="momentum of a matrix for which the loaded checkpoint has none: Adam's first moment, or zero",
    )
    wave_bytes: PositiveInt = Field(
        32 << 20, title="a positive number of bytes", description="matrices that one rank orthogonalizes at a time"
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HyperMuonOptions:
        """Read the options back from Megatron's arguments, where :func:`resolve` put them."""
        return schema.read_back(args, cls, PREFIX)


def flag_of(name: str) -> str:
    """`ns_steps` -> `--hypermuon-ns-steps`."""
    return schema.flag_of(PREFIX, name)


def resolve(args: argparse.Namespace, section: dict[str, Any], *, source: str | None) -> HyperMuonOptions:
    """Merge the command line, a file's section and the defaults, and store the result on `args`.

    Args:
        args: Megatron's namespace with our flags in it.
        section: By field, what the file has.
        source: The file.

    Raises:
        ConfigurationError: An invalid value, or an option without `--use-hypermuon`.
    """
    on_line = schema.given(args, HyperMuonOptions, PREFIX)
    if not args.use_hypermuon:
        stray = [flag_of(name) for name in on_line]
        if section:
            stray.append(f"the section hypermuon of {source}")
        if stray:
            raise ConfigurationError(
                f"{', '.join(stray)} has no effect without --use-hypermuon; add --use-hypermuon to train matrices "
                "with Muon, or remove it."
            )
    schema.validated(HyperMuonOptions, section, PREFIX, source=source)
    schema.validated(HyperMuonOptions, on_line, PREFIX)
    options = schema.validated(HyperMuonOptions, {**section, **on_line}, PREFIX)
    _check_names(options)
    schema.store(args, options, PREFIX)
    return options


def _check_names(options: HyperMuonOptions) -> None:
    try:
        scale_formula(options.scale)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag_of('scale')}: {error}") from None
    try:
        resolve_coefficients(options.coefficients, options.ns_steps)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag_of('coefficients')}: {error}") from None
