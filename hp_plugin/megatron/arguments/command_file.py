"""Reading the arguments of a Megatron job from a file: a list of arguments, or the shell script that starts the job.

A script is not run. Its words are read as a shell would split them; variables that the script itself sets are put in,
and words inside arrays and strings count. What depends on anything else, `$1` say, stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.arguments.known_arguments import Argument, known_arguments

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_OPERATORS = "();&|<>"


@dataclass(frozen=True)
class Given:
    """A flag as it stands in a file.

    Attributes:
        flag: As it is spelt.
        words: What follows it, variables put in.
        argument: What Megatron knows by that name; None for a flag that is not Megatron's.
    """

    flag: str
    words: tuple[str, ...]
    argument: Argument | None

    @property
    def value(self) -> object:
        """The value as Megatron's parser would make it, numbers as numbers."""
        kind = self.argument.kind if self.argument else "values"
        if kind in ("on", "off"):
            return kind == "on"
        if kind == "switch":
            return not self.flag.startswith("--no-")
        values = [_number(word) for word in self.words]
        if kind == "values":
            return values
        return values[0] if values else None

    @property
    def text(self) -> str:
        """As one would type it."""
        return " ".join((self.flag, *self.words))


def read_arguments(path: str) -> list[Given]:
    """The flags of a file, in order.

    Raises:
        ConfigurationError: The file cannot be read, has a quote that is not closed, or has no flag at all.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigurationError(f"{path} cannot be read: {reason}.") from error
    try:
        words = list(_words(text))
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be split into words as a shell would: {error}.") from error
    found = list(_flags(words))
    if not found:
        raise ConfigurationError(
            f"{path} has no flag. Expected Megatron's arguments, or the shell script that starts the job."
        )
    return found


def arguments_of(words: Sequence[str]) -> list[Given]:
    """The flags among the words of a command line."""
    return list(_flags(list(words)))


def _words(text: str) -> Iterator[str]:
    variables: dict[str, str] = {}
    # A backslash before the end of a line joins lines; shlex would keep the newline.
    for token in _split(text.replace("\\\r\n", " ").replace("\\\n", " ")):
        token = _put_in(token, variables)
        assignment = _ASSIGNMENT.fullmatch(token)
        if assignment is None:
            yield from token.split() if token.startswith("--") else [token]
            continue
        variables[assignment[1]] = assignment[2]
        if "--" in assignment[2]:
            yield from _split(assignment[2])
            yield ";"
            variables[assignment[1]] = ""  # its flags have been counted; where it is used they would be so again


def _split(text: str) -> Iterator[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    yield from lexer


def _put_in(token: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0] if match[3] is None else match[3])

    return _VARIABLE.sub(value, token)


def _flags(words: Sequence[str]) -> Iterator[Given]:
    known = known_arguments()
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or word == "--":
            continue
        flag, given, rest = word.partition("=")
        argument = known.get(flag)
        found = [rest] if given else []
        limit = _limit(argument) - len(found)
        while limit > 0 and position < len(words) and not _ends_values(words[position]):
            found.append(words[position])
            position, limit = position + 1, limit - 1
        yield Given(flag, tuple(found), argument)


def _limit(argument: Argument | None) -> int:
    """How many words may belong to a flag; of a flag that is not known, one."""
    if argument is None:
        return 1
    return {"value": 1, "optional": 1, "values": 1 << 20}.get(argument.kind, 0)


def _ends_values(word: str) -> bool:
    return word.startswith("--") or set(word) <= set(_OPERATORS)


def _number(word: str) -> object:
    for make in (int, float):
        try:
            return make(word)
        except ValueError:
            continue
    return word
