"""The command line of the adapter: ``--use-hyperfsdp``, ``--hyperfsdp-*`` and ``--hyperfsdp-config FILE``.

One pydantic schema, :class:`HyperFSDPOptions`, is the source of the flags, of the keys of the YAML file and of
what the data-parallel class reads. A value given on the command line wins over the file, the file over the
default. Values that a later release will build are refused here by name, never ignored.

After :func:`resolve` the options live on Megatron's own argument namespace as plain strings, numbers and
booleans, because Megatron pickles that namespace into checkpoints that must load without this package.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from hp_plugin.errors import ConfigurationError, UnsupportedError

PREFIX = "--hyperfsdp-"
MUON_PREFIX = "--hypermuon-"
DEVICE_VARIABLE = "HP_DEVICE"
"""Environment variable read where ``--hyperfsdp-device`` is not given: ``cpu`` asks for the CPU compatibility layer."""


class HyperFSDPOptions(BaseModel):
    """Options of HyperFSDP in a Megatron job; the field names are the YAML keys and, with dashes, the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    supernode_size: Literal["auto"] | PositiveInt = Field(
        "auto",
        title="auto or a positive number of ranks",
        description="ranks per supernode, the domain with the fast links; auto goes by host names",
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
        "production", title="production", description="production moves plain tensors"
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
    migrate: Literal["observe"] | None = Field(None, title="observe", description="not available yet")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HyperFSDPOptions:
        """Read the options back from Megatron's arguments, where :func:`resolve` put them."""
        return cls(**{name: getattr(args, f"hyperfsdp_{name}") for name in cls.model_fields})


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Append the group ``hyperfsdp`` to Megatron's parser. A flag that is not given stays None."""
    group = parser.add_argument_group(title="hyperfsdp")
    group.add_argument(
        "--use-hyperfsdp",
        action="store_true",
        help="wrap the model in topology-aware fully sharded data parallelism (hp_plugin)",
    )
    group.add_argument("--use-hypermuon", action="store_true", help="not available yet")
    group.add_argument(
        PREFIX + "config",
        metavar="FILE",
        default=None,
        help="YAML file with any of the options below; the command line wins",
    )
    for name, field in HyperFSDPOptions.model_fields.items():
        # A bare boolean flag means true; everything else takes a value.
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        help_text = f"{field.description} ({field.title}; default: {_text(field.default)})"
        group.add_argument(
            flag_of(name),
            dest=f"hyperfsdp_{name}",
            metavar="VALUE",
            default=None,
            help=help_text.replace("%", "%%"),
            **bare,
        )
    return parser


def flag_of(name: str) -> str:
    """``supernode_size`` -> ``--hyperfsdp-supernode-size``."""
    return PREFIX + name.replace("_", "-")


def check_spelling(argv: Sequence[str]) -> None:
    """Refuse a flag that begins like one of ours and is none, before argparse reports or drops it.

    Raises:
        ConfigurationError: An unknown ``--hyperfsdp-*`` flag, with the nearest known one.
        UnsupportedError: Any ``--hypermuon-*`` flag.
    """
    known = [flag_of(name) for name in HyperFSDPOptions.model_fields] + [PREFIX + "config"]
    for word in argv:
        flag = word.split("=", 1)[0]
        if flag.startswith(MUON_PREFIX):
            raise UnsupportedError(f"{flag} is not available in this release; {_MUON_ADVICE}")
        if flag.startswith(PREFIX) and flag not in known:
            raise ConfigurationError(f"{flag} is not a known flag{_did_you_mean(flag, known)}")


def resolve(args: argparse.Namespace) -> HyperFSDPOptions:
    """Merge command line, YAML file and defaults, refuse what is not built, and store the result on ``args``.

    Args:
        args: The namespace that Megatron's parser returned, with our group in it. Its ``hyperfsdp_*``
            attributes are replaced by plain resolved values.

    Returns:
        The resolved options.

    Raises:
        ConfigurationError: An invalid value, an unknown key, an unreadable file, or an option without
            ``--use-hyperfsdp``.
        UnsupportedError: A value that a later release will build.
    """
    if args.use_hypermuon:
        raise UnsupportedError(f"--use-hypermuon is not available in this release; {_MUON_ADVICE}")
    on_line = {
        name: _scalar(value)
        for name in HyperFSDPOptions.model_fields
        if (value := getattr(args, f"hyperfsdp_{name}")) is not None
    }
    if not args.use_hyperfsdp:
        stray = [flag_of(name) for name in on_line if name != "device"]
        if args.hyperfsdp_config is not None:
            stray.append(PREFIX + "config")
        if stray:
            raise ConfigurationError(
                f"{', '.join(stray)} has no effect without --use-hyperfsdp; add --use-hyperfsdp "
                "to turn HyperFSDP on, or remove the flag."
            )
    in_file = read_config(args.hyperfsdp_config) if args.hyperfsdp_config is not None else {}
    # Validated apart, so that a message names the place where the value stands.
    _validated(in_file, source=str(args.hyperfsdp_config))
    _validated(on_line, source=None)
    options = _validated({**in_file, **on_line}, source=None)
    _refuse_unavailable(options)
    for name in HyperFSDPOptions.model_fields:
        setattr(args, f"hyperfsdp_{name}", getattr(options, name))
    return options


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of options. Keys are field names; the spelling of the flags is accepted too.

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
    known, options = list(HyperFSDPOptions.model_fields), {}
    for key, value in content.items():
        name = str(key).removeprefix(PREFIX).replace("-", "_").removeprefix("hyperfsdp_")
        if name not in known:
            raise ConfigurationError(f"{path}: unknown key {str(key)!r}{_did_you_mean(name, known)}")
        if name in options:
            raise ConfigurationError(f"{path}: {name} is given twice.")
        options[name] = value
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
    return str(_validated({"device": device}, source=None).device)


_MUON_ADVICE = "remove the flag and keep Megatron's --optimizer adam."

_UNAVAILABLE: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    # option: (refused values, or None for any value that is given, what to do instead)
    "transport": (("symm_mem",), "use auto, c10d or shm"),
    "mode": (("validation",), "use production"),
    "optimizer_sharding": (("shard_replicate",), "use auto or shard"),
    "migrate": (None, "remove the option"),
}


def _refuse_unavailable(options: HyperFSDPOptions) -> None:
    for name, (refused, advice) in _UNAVAILABLE.items():
        value = getattr(options, name)
        if value is not None and (refused is None or value in refused):
            raise UnsupportedError(f"{flag_of(name)} {value} is not available in this release; {advice}.")


def _validated(values: Mapping[str, Any], *, source: str | None) -> HyperFSDPOptions:
    try:
        return HyperFSDPOptions(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        where = flag_of(name) if source is None else f"{source}: {name}"
        expected = HyperFSDPOptions.model_fields[name].title
        raise ConfigurationError(f"{where} is {_text(values[name])!r}; expected {expected}.") from None


def _scalar(text: str) -> str | int | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
