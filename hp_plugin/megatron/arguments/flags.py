"""The command line of the adapter: ``--use-hyperfsdp``, ``--use-hypermuon``, their options, and a file of options.

One pydantic schema, :class:`HyperFSDPOptions`, is the source of the flags, of the keys of the YAML file and of
what the data-parallel class reads; that of Muon is in `muon_flags`. A value given on the command line wins over the
file, the file over the default. Values that a later release will build are refused here by name, never ignored.

After :func:`resolve` the options live on Megatron's own argument namespace as plain strings, numbers and
booleans, because Megatron pickles that namespace into checkpoints that must load without this package.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.host.words import did_you_mean
from hp_plugin.megatron.arguments import muon_flags, schema

PREFIX = "--hyperfsdp-"
MUON_PREFIX = muon_flags.PREFIX
MUON_SECTION = "hypermuon"
"""Key of the options of Muon in a file."""

DEVICE_VARIABLE = "HP_DEVICE"
"""Environment variable read where ``--hyperfsdp-device`` is not given: ``cpu`` asks for the CPU compatibility layer."""


class HyperFSDPOptions(BaseModel):
    """Options of HyperFSDP in a Megatron job; the field names are the YAML keys and, with dashes, the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    supernode_size: Literal["auto"] | PositiveInt = Field(
        "auto",
        title="auto or a positive number of ranks",
        description="ranks per supernode, the domain with fast links; auto goes by rank table, fabric or host names",
    )
    shard_size: Literal["supernode", "world"] | PositiveInt = Field(
        "supernode",
        title="supernode, world or a positive number of ranks",
        description="over how many data-parallel ranks each parameter is split; the rest are replicas",
    )
    reshard_after_forward: bool | PositiveInt = Field(
        True,
        title="true, false or a number of ranks",
        description="free the full parameters of a layer after its forward and gather them again in backward; a number "
        "that divides the shard size keeps them sharded over that many ranks in between",
    )
    transport: Literal["auto", "shm", "symm_mem", "c10d"] = Field(
        "auto",
        title="auto, c10d or shm",
        description="how bytes move inside a supernode: collectives (c10d) or memory that processes of one host share "
        "(shm); auto is shm on CPU where it is possible, else c10d",
    )
    mode: Literal["production", "validation"] = Field(
        "production",
        title="production or validation",
        description="validation compares the first steps with the same steps of stock Megatron on one rank",
    )
    validation_steps: PositiveInt = Field(
        2,
        title="a positive number",
        description="steps that are compared in validation mode; in the first of a warm-up the learning rate is 0",
    )
    validation_then: Literal["continue", "stop"] = Field(
        "continue", title="continue or stop", description="what follows the last step that is compared"
    )
    optimizer_sharding: Literal["auto", "shard", "shard_replicate"] = Field(
        "auto", title="auto or shard", description="which ranks share the optimizer state; auto is shard today"
    )
    reduce_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        title="auto, fp32 or bf16",
        description="dtype of the gradient reduction; auto follows --accumulate-allreduce-grads-in-fp32",
    )
    bucket_bytes: PositiveInt | None = Field(
        None,
        title="a positive number of bytes",
        description="gradient bytes per message between supernodes; by default what suits the measured link",
    )
    window: PositiveInt | None = Field(
        None,
        title="a positive number of buckets",
        description="gradient buckets that may wait for the link between supernodes; by default 2",
    )
    prefetch: NonNegativeInt | None = Field(
        None,
        title="a number of bytes, or 0 for none",
        description="bytes of full parameters gathered ahead of their use; by default those of the largest layer",
    )
    deterministic: bool = Field(
        False,
        title="true or false",
        description="sums in the same order in every run and on every transport, thus the same digits",
    )
    device: Literal["auto", "cpu"] = Field(
        "auto",
        title="auto or cpu",
        description="cpu answers torch.cuda names on CPU (for tests and tutorials; refused where there is an "
        "accelerator); auto never emulates",
    )
    migrate: Literal["observe"] | None = Field(
        None,
        title="observe",
        description="observe trains with Megatron's own back end and says after a few steps what HyperFSDP would take "
        "and send",
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HyperFSDPOptions:
        """Read the options back from Megatron's arguments, where :func:`resolve` put them."""
        return schema.read_back(args, cls, PREFIX)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Append the group ``hyperfsdp`` to Megatron's parser. A flag that is not given stays None."""
    group = parser.add_argument_group(title="hyperfsdp")
    group.add_argument(
        "--use-hyperfsdp",
        action="store_true",
        help="wrap the model in topology-aware fully sharded data parallelism (hp_plugin)",
    )
    group.add_argument(
        PREFIX + "config",
        metavar="FILE",
        default=None,
        help="YAML file with any of the options below, those of Muon under hypermuon; the command line wins",
    )
    schema.add_flags(group, HyperFSDPOptions, PREFIX)
    muon = parser.add_argument_group(title="hypermuon")
    muon.add_argument(
        "--use-hypermuon",
        action="store_true",
        help="train hidden matrices with Muon, distributed by layout, and the rest with AdamW (hp_plugin); with or "
        "without --use-hyperfsdp",
    )
    schema.add_flags(muon, muon_flags.HyperMuonOptions, MUON_PREFIX)
    return parser


def flag_of(name: str) -> str:
    """``supernode_size`` -> ``--hyperfsdp-supernode-size``."""
    return schema.flag_of(PREFIX, name)


def check_spelling(argv: Sequence[str]) -> None:
    """Refuse a flag that begins like one of ours and is none, before argparse reports or drops it.

    Raises:
        ConfigurationError: An unknown ``--hyperfsdp-*`` or ``--hypermuon-*`` flag, with the nearest known one.
    """
    known = {
        PREFIX: [*map(flag_of, HyperFSDPOptions.model_fields), PREFIX + "config"],
        MUON_PREFIX: [*map(muon_flags.flag_of, muon_flags.HyperMuonOptions.model_fields)],
    }
    for word in argv:
        flag = word.split("=", 1)[0]
        for prefix, names in known.items():
            if flag.startswith(prefix) and flag not in names:
                raise ConfigurationError(f"{flag} is not a known flag{did_you_mean(flag, names)}")


def resolve(args: argparse.Namespace) -> HyperFSDPOptions:
    """Merge command line, YAML file and defaults, refuse what is not built, and store the result on ``args``.

    Args:
        args: The namespace that Megatron's parser returned, with our groups in it. Its ``hyperfsdp_*`` and
            ``hypermuon_*`` attributes are replaced by plain resolved values.

    Returns:
        The resolved options of HyperFSDP.

    Raises:
        ConfigurationError: An invalid value, an unknown key, an unreadable file, or an option without the switch
            that it belongs to.
        UnsupportedError: A value that a later release will build.
    """
    on_line = schema.given(args, HyperFSDPOptions, PREFIX)
    path = args.hyperfsdp_config
    if not args.use_hyperfsdp:
        _refuse_stray(args, on_line)
    in_file = read_config(path) if path is not None else {}
    of_muon = in_file.pop(MUON_SECTION, {})
    if in_file and not args.use_hyperfsdp:
        raise ConfigurationError(
            f"{', '.join(in_file)} of {path} has no effect without --use-hyperfsdp; add --use-hyperfsdp or remove it."
        )
    # Validated apart, so that a message names the place where the value stands.
    schema.validated(HyperFSDPOptions, in_file, PREFIX, source=str(path))
    schema.validated(HyperFSDPOptions, on_line, PREFIX)
    options = schema.validated(HyperFSDPOptions, {**in_file, **on_line}, PREFIX)
    _refuse_unavailable(options)
    _refuse_without_validation({**in_file, **on_line}, options)
    schema.store(args, options, PREFIX)
    muon_flags.resolve(args, of_muon, source=path)
    return options


def _refuse_stray(args: argparse.Namespace, on_line: Mapping[str, Any]) -> None:
    stray = [flag_of(name) for name in on_line if name != "device"]
    if args.hyperfsdp_config is not None and not args.use_hypermuon:
        stray.append(PREFIX + "config")
    if stray:
        raise ConfigurationError(
            f"{', '.join(stray)} has no effect without --use-hyperfsdp; add --use-hyperfsdp "
            "to turn HyperFSDP on, or remove the flag."
        )


def _refuse_without_validation(given: Mapping[str, Any], options: HyperFSDPOptions) -> None:
    stray = [flag_of(name) for name in given if name.startswith("validation_")]
    if stray and options.mode != "validation":
        raise ConfigurationError(
            f"{', '.join(stray)} has no effect without {flag_of('mode')} validation; add that, or remove the flag."
        )


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options. Keys are field names; the spelling of the flags is accepted too.

    Returns:
        The options of HyperFSDP by field, and, if the file has any, those of Muon under `MUON_SECTION`.

    Raises:
        ConfigurationError: The file cannot be read, is not a mapping, or has an unknown or repeated key.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{PREFIX}config {path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{PREFIX}config {path} is not valid YAML: {_one_line(error)}.") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"{PREFIX}config {path} holds a {type(content).__name__}; expected a mapping such as 'supernode_size: 8'."
        )
    muon = content.get(MUON_SECTION)
    rest = {key: value for key, value in content.items() if key != MUON_SECTION}
    options = schema.by_field(rest, HyperFSDPOptions, PREFIX, source=path)
    if muon is not None:
        if not isinstance(muon, Mapping):
            raise ConfigurationError(f"{path}: {MUON_SECTION} holds a {type(muon).__name__}; expected a mapping.")
        where = f"{path}: {MUON_SECTION}"
        options[MUON_SECTION] = schema.by_field(muon, muon_flags.HyperMuonOptions, MUON_PREFIX, source=where)
    return options


def requested_device(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What device a job asks for, before Megatron or its parser is imported: ``auto`` or ``cpu``.

    The CPU compatibility layer must be in place before Megatron is imported, hence before arguments are
    parsed. This looks at the command line, then at the YAML file, then at ``HP_DEVICE``.
    """
    environment = os.environ if environment is None else environment
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument(PREFIX + "device", dest="device")
    early.add_argument(PREFIX + "config", dest="config")
    try:
        found, _ = early.parse_known_args(list(argv))
    except argparse.ArgumentError as error:  # a flag without its value
        raise ConfigurationError(f"{error}.") from error
    device = found.device
    if device is None and found.config is not None:
        device = read_config(found.config).get("device")
    if device is None:
        variable = environment.get(DEVICE_VARIABLE, "").strip() or "auto"
        if variable not in ("auto", "cpu"):
            raise ConfigurationError(f"{DEVICE_VARIABLE} is {variable!r}; expected auto or cpu.")
        return variable
    return str(schema.validated(HyperFSDPOptions, {"device": device}, PREFIX).device)


_UNAVAILABLE: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    # option: (refused values, or None for any value that is given, what to do instead)
    "transport": (("symm_mem",), "use auto, c10d or shm"),
    "optimizer_sharding": (("shard_replicate",), "use auto or shard"),
}


def _refuse_unavailable(options: HyperFSDPOptions) -> None:
    for name, (refused, advice) in _UNAVAILABLE.items():
        value = getattr(options, name)
        if value is not None and (refused is None or value in refused):
            raise UnsupportedError(f"{flag_of(name)} {value} is not available in this release; {advice}.")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
