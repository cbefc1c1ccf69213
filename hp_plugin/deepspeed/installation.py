"""`install()`: makes DeepSpeed know the block `"hyperfsdp"`.

One patch point makes the engine: `DeepSpeedEngine.__new__` gives a `HyperFSDPEngine` for a configuration with our block
and what it always gave otherwise. Beside it, a few functions that take a parameter learn to recognise ours. All of it
happens when `deepspeed` is imported, or at once where it has been.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hp_plugin.deepspeed import targets, versions

_HOST = "deepspeed"

Undo = Callable[[], None]


class _Installation:
    """What `install` changed. The one piece of process-wide state of this adapter."""

    def __init__(self) -> None:
        self.version = versions.check_deepspeed()
        self.finder: _AfterImport | None = None
        self.undo: list[Undo] = []
        if _HOST in sys.modules:
            self.patch()
        else:
            self.finder = _AfterImport(self.patch)
            sys.meta_path.insert(0, self.finder)

    def patch(self) -> None:
        """Puts our names in place; DeepSpeed has been imported."""
        targets.check_targets(self.version)
        for name in ("dispatch", "gathered", "tensors", "zero_to_fp32", "operations"):
            module = importlib.import_module(f"hp_plugin.deepspeed.{name}")
            self.undo.append(module.install())

    def restore(self) -> None:
        """Puts DeepSpeed's own names back."""
        if self.finder is not None and self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        for undo in reversed(self.undo):
            undo()


_installed: _Installation | None = None


def install() -> None:
    """Make `"hyperfsdp"` known to DeepSpeed in this process. A second call does nothing.

    Raises:
        UnsupportedError: DeepSpeed is missing or of a series that is not supported, or one of its names that the
            adapter relies on has changed. The last is found when DeepSpeed is imported.
    """
    global _installed
    if _installed is None:
        _installed = _Installation()


def uninstall() -> None:
    """Put everything back. Engines that exist keep working. For tests."""
    global _installed
    if _installed is not None:
        _installed.restore()
        _installed = None


def rebinding_table() -> list[dict[str, str]]:
    """Every name of DeepSpeed that the adapter extends or replaces, and whether it fits; imports DeepSpeed.

    Returns:
        Entries with `target`, `purpose`, `kind` ("extended" or "replaced") and `state` ("fits", or what does not).

    Raises:
        UnsupportedError: No supported DeepSpeed is installed.
    """
    versions.check_deepspeed()
    importlib.import_module(_HOST)
    return [
        {
            "target": target.path.replace(":", "."),
            "purpose": target.purpose,
            "kind": kind,
            "state": targets.problem_of(target) or "fits",
        }
        for kind, group in (("extended", targets.EXTENDED), ("replaced", targets.REPLACED))
        for target in group
    ]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then` once the package `deepspeed` has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls back. Asking for it changes nothing."""
        if fullname != _HOST or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this spec's loader alone
        return spec
