"""Every flag of the newest supported Megatron-LM, what follows it on a command line, and what becomes of it.

The list is `known_arguments.txt`, so that argument files can be read where Megatron is not installed. A test compares
it with the parser of the installed release: a flag of a newer one is looked at before the release is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

RELEASE = "0.19.2"
"""The release whose flags are listed."""

Kind = Literal["on", "off", "switch", "value", "optional", "values"]
GROUPS = ("refused", "switched off", "replaced", "without effect", "inert", "respected", "unaffected")


@dataclass(frozen=True)
class Argument:
    """One argument of Megatron's parser.

    Attributes:
        flags: Its spellings.
        kind: What follows it; see the head of the list.
        attribute: Its name on the namespace.
        group: What becomes of it with `--use-hyperfsdp`, one of `GROUPS`.
    """

    flags: tuple[str, ...]
    kind: Kind
    attribute: str
    group: str

    @property
    def takes_words(self) -> bool:
        """Whether words may follow."""
        return self.kind in ("value", "optional", "values")


@cache
def known_arguments() -> Mapping[str, Argument]:
    """The arguments by flag."""
    found: dict[str, Argument] = {}
    group = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("["):
            group = text.strip("[]")
        elif text:
            flags, kind, attribute = text.split()
            argument = Argument(tuple(flags.split(",")), kind, attribute, group)  # type: ignore[arg-type]
            found.update(dict.fromkeys(argument.flags, argument))
    return MappingProxyType(found)
