"""What the option groups of the adapter have in common: one pydantic schema, flags made of it, values checked by it.

A flag that is not given stays None on Megatron's namespace, so that a value of a file or a default can take its place.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hp_plugin.errors import ConfigurationError
from hp_plugin.host.words import did_you_mean

Model = TypeVar("Model", bound=BaseModel)

_NUMBER = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?")


def flag_of(prefix: str, name: str) -> str:
    """`--hyperfsdp-`, `supernode_size` -> `--hyperfsdp-supernode-size`."""
    return prefix + name.replace("_", "-")


def attribute_of(prefix: str, name: str) -> str:
    """`--hyperfsdp-`, `supernode_size` -> `hyperfsdp_supernode_size`, the name on Megatron's namespace."""
    return f"{prefix.strip('-')}_{name}"


def add_flags(group: Any, model: type[BaseModel], prefix: str) -> None:
    """One flag for each field of `model`; the field's title and description are its help."""
    for name, field in model.model_fields.items():
        # A bare boolean flag means true; everything else takes a value.
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if _takes_truth(field.annotation) else {}
        help_text = f"{field.description} ({field.title}; default: {text_of(field.default)})"
        group.add_argument(
            flag_of(prefix, name),
            dest=attribute_of(prefix, name),
            metavar="VALUE",
            default=None,
            help=help_text.replace("%", "%%"),
            **bare,
        )


def given(args: argparse.Namespace, model: type[BaseModel], prefix: str) -> dict[str, Any]:
    """The values of the command line, by field, as numbers and booleans where they look like that."""
    values = {name: getattr(args, attribute_of(prefix, name), None) for name in model.model_fields}
    return {name: scalar(value) for name, value in values.items() if value is not None}


def read_back(args: argparse.Namespace, model: type[Model], prefix: str) -> Model:
    """The options that :func:`store` put on Megatron's arguments."""
    return model(**{name: getattr(args, attribute_of(prefix, name)) for name in model.model_fields})


def store(args: argparse.Namespace, options: BaseModel, prefix: str) -> None:
    """Put plain values on Megatron's arguments, which are pickled into checkpoints."""
    for name in type(options).model_fields:
        setattr(args, attribute_of(prefix, name), getattr(options, name))


def validated(model: type[Model], values: Mapping[str, Any], prefix: str, *, source: str | None = None) -> Model:
    """The options with `values`, the rest by default.

    Args:
        model: The schema.
        values: By field.
        prefix: Of the flags.
        source: The file in which the values stand; None for the command line. For the message.

    Raises:
        ConfigurationError: A value does not fit, with its place and what was expected.
    """
    try:
        return model(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        where = flag_of(prefix, name) if source is None else f"{source}: {name}"
        expected = model.model_fields[name].title
        raise ConfigurationError(f"{where} is {text_of(values[name])!r}; expected {expected}.") from None


def by_field(content: Mapping[Any, Any], model: type[BaseModel], prefix: str, *, source: str) -> dict[str, Any]:
    """The keys of a mapping in a file as field names; the spelling of the flags is accepted too.

    Raises:
        ConfigurationError: An unknown or repeated key.
    """
    known, options = list(model.model_fields), {}
    own = prefix.strip("-") + "_"
    for key, value in content.items():
        name = str(key).removeprefix(prefix).replace("-", "_").removeprefix(own)
        if name not in known:
            raise ConfigurationError(f"{source}: unknown key {str(key)!r}{did_you_mean(name, known)}")
        if name in options:
            raise ConfigurationError(f"{source}: {name} is given twice.")
        options[name] = value
    return options


def scalar(text: str) -> str | int | float | bool:
    """A word of the command line as the boolean or number that it spells, else as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def text_of(value: object) -> str:
    """A value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _takes_truth(annotation: Any) -> bool:
    """Whether the field is a boolean and nothing else."""
    if get_origin(annotation) in (Union, types.UnionType):
        return all(each in (bool, type(None)) for each in get_args(annotation))
    return annotation is bool
