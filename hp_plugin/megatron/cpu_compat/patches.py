"""A ledger of replaced attributes: what was replaced, why, and how to put it back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        name: Dotted name of what was replaced, as a person would write it.
        area: What the replacement emulates; patches of one area belong together.
        owner: Module or class that holds the attribute.
        attribute: Its name there.
        original: What its ``__dict__`` held before, or a marker when it held nothing (the attribute was
            inherited or absent).
    """

    name: str
    area: str
    owner: Any
    attribute: str
    original: Any


@dataclass
class Ledger:
    """Replaces attributes and environment variables and can undo all of it."""

    patches: list[Patch] = field(default_factory=list)
    _environment: dict[str, str | None] = field(default_factory=dict)

    def replace(self, owner: Any, attribute: str, value: Any, *, area: str) -> None:
        """Set ``owner.attribute`` to ``value`` and remember what was there."""
        original = vars(owner).get(attribute, _MISSING)
        self.patches.append(Patch(f"{_dotted(owner)}.{attribute}", area, owner, attribute, original))
        setattr(owner, attribute, value)

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable and remember what it was."""
        self._environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def undo(self) -> None:
        """Put everything back, last replaced first."""
        while self.patches:
            patch = self.patches.pop()
            if patch.original is _MISSING:
                delattr(patch.owner, patch.attribute)
            else:
                setattr(patch.owner, patch.attribute, patch.original)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment.clear()


def _dotted(owner: Any) -> str:
    if isinstance(owner, type):
        module = "torch" if owner.__module__ == "torch._tensor" else owner.__module__
        return f"{module}.{owner.__qualname__}"
    return str(owner.__name__)
