"""The block `"hyperfsdp"` of a DeepSpeed configuration: a strict schema and messages that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StrictBool, StrictStr, ValidationError

from hp_plugin.errors import ConfigurationError
from hp_plugin.host.words import did_you_mean

BLOCK = "hyperfsdp"


class HyperFSDPConfig(BaseModel):
    """What a job asks of HyperFSDP. Names are those of `fully_shard` and of `Topology`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: StrictBool = Field(True, title="true or false", description="false is as if the block were not there")
    supernode_size: PositiveInt | Literal["auto"] = Field(
        "auto", title='a number of ranks or "auto"', description="ranks that share the fast links"
    )
    shard_size: PositiveInt | Literal["supernode", "world"] = Field(
        "supernode",
        title='a number of ranks, "supernode" or "world"',
        description="ranks among which weights are split",
    )
    reshard_after_forward: StrictBool | PositiveInt = Field(
        True, title="true, false or a number of ranks", description="as in fully_shard"
    )
    transport: Literal["auto", "shm", "symm_mem", "c10d"] = Field(
        "auto", title='"auto", "shm", "symm_mem" or "c10d"', description="how bytes move inside a supernode"
    )
    mode: Literal["production", "validation"] = Field(
        "production",
        title='"production" or "validation"',
        description="validation compares the first steps with the same steps of the unsharded model",
    )
    validation_steps: PositiveInt = Field(
        2, title="a positive number", description="steps that are compared in validation mode"
    )
    optimizer_sharding: Literal["auto", "shard", "shard_replicate"] = Field(
        "auto", title='"auto", "shard" or "shard_replicate"', description="as in fully_shard"
    )
    bucket_bytes: PositiveInt | None = Field(None, title="a number of bytes", description="as in fully_shard")
    window: PositiveInt | None = Field(None, title="a number of buckets", description="as in fully_shard")
    prefetch: int | None = Field(None, ge=0, title="a number of bytes, 0 for none", description="as in fully_shard")
    deterministic: StrictBool = Field(False, title="true or false", description="as in fully_shard")
    units: Literal["auto"] | list[StrictStr] = Field(
        "auto",
        title='"auto" or a list of names of module classes',
        description="which modules are gathered as a whole; auto: the members of every ModuleList and Sequential",
    )


def read_block(config: Mapping[str, Any]) -> HyperFSDPConfig | None:
    """Our block of a DeepSpeed configuration; None where there is none or it is not enabled.

    Raises:
        ConfigurationError: A key is unknown or a value does not fit, or a top-level key is a misspelling of the block.
    """
    if BLOCK not in config:
        _check_spelling_of_block(config)
        return None
    block = config[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigurationError(
            f'the block "{BLOCK}" is {block!r}, but must be an object, for example {{"supernode_size": 8}}.'
        )
    known = list(HyperFSDPConfig.model_fields)
    for key in block:
        if key not in known:
            raise ConfigurationError(f'unknown key "{key}" in the block "{BLOCK}"{did_you_mean(str(key), known)}')
    try:
        options = HyperFSDPConfig(**block)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        expected = HyperFSDPConfig.model_fields[name].title
        raise ConfigurationError(f'"{BLOCK}.{name}" is {block[name]!r}; expected {expected}.') from None
    if "validation_steps" in block and options.mode != "validation":
        raise ConfigurationError(
            f'"{BLOCK}.validation_steps" has no effect without "mode": "validation"; add that, or remove it.'
        )
    return options if options.enabled else None


def _check_spelling_of_block(config: Mapping[str, Any]) -> None:
    # DeepSpeed ignores unknown top-level keys, so a misspelt block would train as something else without a word.
    for key in config:
        plain = str(key).lower().replace("_", "").replace("-", "")
        if difflib.get_close_matches(plain, [BLOCK], cutoff=0.75):
            raise ConfigurationError(
                f'the configuration has the key "{key}", which DeepSpeed would ignore without a word; did you mean '
                f'"{BLOCK}"?'
            )
