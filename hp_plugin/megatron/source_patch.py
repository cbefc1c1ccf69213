"""What the patches in `patches/` put into Megatron's sources, for sites where nothing may be replaced at run time.

A patched Megatron calls us by name, and so needs neither the launcher nor ``install()``: `parse_args` is wrapped where
it is defined, the data-parallel class goes through :func:`data_parallel_class` where it is chosen, and functions that
`targets` lists are marked :func:`routed` where they are defined. A job without our flags runs the original code.

Importing this module does not import Megatron. Where the launcher is used all the same, it takes precedence: the
patched places then do nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from hp_plugin.errors import HyperParallelError
from hp_plugin.megatron import installation, reporting
from hp_plugin.megatron.releases import rebind, versions
from hp_plugin.megatron.releases.targets import TABLES, Stage, Target


class Routes(rebind.Rebinder):
    """Which targets are taken over, where the sources ask at every call instead of being replaced."""

    def __init__(self, version: str) -> None:
        super().__init__(version, TABLES[versions.series(version)])
        self._active: set[Stage] = {"arguments"}
        self._replacements: dict[Target, Any] = {}

    def activate(self, stage: Stage) -> None:
        """From now on :func:`routed` functions of ``stage`` are ours."""
        self._active.add(stage)

    def deactivate(self, stage: Stage) -> None:
        """From now on those of ``stage`` are Megatron's."""
        if stage != "arguments":
            self._active.discard(stage)

    def is_rebound(self, target: Target) -> bool:
        """Whether ``target`` is taken over at this moment."""
        return target.stage in self._active

    def of(self, attribute: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function to call for ``original``, which ``targets`` knows as ``attribute``."""
        known = (target for target in self._targets if target.attribute == attribute)
        target = next((target for target in known if target.stage in self._active), None)
        if target is None:
            return original
        if target not in self._replacements:
            self._replacements[target] = rebind.load(target.factory)(original)
        replacement: Callable[..., Any] = self._replacements[target]
        return replacement


def parse_args(original: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Decorates Megatron's `parse_args`: adds our flags, checks them, and decides what is taken over.

    A Megatron of a release that is not supported ends the job with a sentence.
    """
    ours = installation.hook_parse_args(original)

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> argparse.Namespace:
        if isinstance(installation.installed(), rebind.Rebinder) and _routes() is None:
            return original(*args, **kwargs)  # the launcher has put its own hook around this function
        if _routes() is None:
            try:
                installation.use(Routes(versions.check_megatron()))
            except HyperParallelError as error:
                reporting.stop(str(error))
        return ours(*args, **kwargs)

    return parse


def routed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that ``targets`` lists: ours once the job asks for it, Megatron's otherwise."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        routes = _routes()
        function = original if routes is None else routes.of(original.__name__, original)
        return function(*args, **kwargs)

    return call


def data_parallel_class(original: type) -> type:
    """The class to wrap a model in, where Megatron would choose ``original``, its `DistributedDataParallel`."""
    routes = _routes()
    if routes is None or not any(t.stage == "active" and routes.is_rebound(t) for t in routes.targets):
        return original
    from hp_plugin.megatron.fsdp.data_parallel import asks_for_hyperfsdp, hyperfsdp_class

    return hyperfsdp_class() if asks_for_hyperfsdp() else original


def _routes() -> Routes | None:
    current = installation.installed()
    return current if isinstance(current, Routes) else None
