"""Replaces the names of Megatron that `targets` lists, and puts them back.

Four stages. The *argument* hooks are in place as soon as :func:`hp_plugin.megatron.install` has run, so that
our flags exist. The *optimizer* target is replaced once a job was parsed with ``--use-hyperfsdp`` or
``--use-hypermuon``, the *active* ones with ``--use-hyperfsdp``, and the *observe* one instead of them with
``--hyperfsdp-migrate observe``; without the flags they stay the original objects, and a stock run is unchanged. Before
anything is replaced the target must exist and take the parameters that the replacement relies on; otherwise it is
refused by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases.targets import TABLES, Factory, Stage, Target


class Rebinder:
    """Replaces the targets of one Megatron release and puts the originals back."""

    def __init__(self, version: str, targets: tuple[Target, ...]) -> None:
        self._version = version
        self._targets = targets
        self._originals: dict[Target, Any] = {}
        self._replacements: dict[Target, Any] = {}

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets of the release."""
        return self._targets

    def activate(self, stage: Stage) -> None:
        """Replace the targets of ``stage``: all of them, or none if one does not fit.

        Raises:
            UnsupportedError: A target is missing or its signature has changed; the message names the
                target and the Megatron version. Or something replaced by an earlier stage is no longer in place.
        """
        self._check_in_place()
        pending = [target for target in self._targets if target.stage == stage and target not in self._originals]
        found = [(target, self._checked(target)) for target in pending]
        made = [(target, original, load(target.factory)(original)) for target, original in found]
        for target, original, replacement in made:
            setattr(sys.modules[target.module], target.attribute, replacement)
            self._originals[target] = original
            self._replacements[target] = replacement

    def deactivate(self, stage: Stage) -> None:
        """Put the originals of ``stage`` back, last replaced first."""
        for target in [t for t in reversed(self._originals) if t.stage == stage]:
            setattr(sys.modules[target.module], target.attribute, self._originals.pop(target))

    def is_rebound(self, target: Target) -> bool:
        """Whether ``target`` is replaced at this moment."""
        return target in self._originals

    def _check_in_place(self) -> None:
        for target in self._originals:
            found = getattr(sys.modules[target.module], target.attribute, None)
            if found is not self._replacements[target]:
                raise UnsupportedError(
                    f"{target.name} of Megatron {self._version} was replaced again, by {_maker(found)}, after it had "
                    "been replaced by hp_plugin; install hp_plugin after every other program that patches Megatron."
                )

    def _checked(self, target: Target) -> Any:
        original = _find(target)
        problem = _problem(target, original)
        if problem is not None:
            raise UnsupportedError(
                f"{target.name} of Megatron {self._version} {problem}, so hp_plugin cannot take its place safely. "
                "Another program may have replaced it, or this Megatron is a modified one; use the release that "
                "hp_plugin supports, or install hp_plugin before the other program."
            )
        return original


def describe(
    version_series: tuple[int, int], rebinder: Rebinder | None = None, *, inspect_targets: bool = False
) -> list[dict[str, str]]:
    """The table as data, one entry per target, with no effect on Megatron.

    Args:
        version_series: ``(major, minor)`` of megatron-core, a key of :data:`TABLES`.
        rebinder: What :func:`hp_plugin.megatron.install` made, if it has run.
        inspect_targets: Import Megatron to see whether each target exists and has the expected signature.

    Returns:
        Entries with ``target``, ``purpose``, ``stage``, ``replacement`` and ``state``. The state is
        ``rebound``, ``original``, ``not inspected``, or a sentence about what does not fit.
    """
    entries = []
    for target in TABLES[version_series]:
        if rebinder is not None and rebinder.is_rebound(target):
            state = "rebound"
        elif inspect_targets:
            state = _problem(target, _find(target)) or "original"
        else:
            state = "not inspected" if target.module not in sys.modules else "original"
        entries.append(
            {
                "target": target.name,
                "purpose": target.purpose,
                "stage": target.stage,
                "replacement": target.factory,
                "state": state,
            }
        )
    return entries


def data_parallel_selector(original: type) -> type:
    """A stand-in for Megatron's DDP class: calling it builds HyperFSDP, ``isinstance`` still means DDP.

    HyperFSDP must not pass for a DDP: the training loop reaches into the gradient buffers of one when it exits.
    """
    from hp_plugin.megatron.fsdp.data_parallel import asks_for_hyperfsdp, hyperfsdp_class

    built = hyperfsdp_class()

    class SelectorType(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (built if asks_for_hyperfsdp() else original)(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return SelectorType(original.__name__, (), {"__module__": __name__, "__doc__": data_parallel_selector.__doc__})


def optimizer_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_megatron_optimizer`` for models wrapped in HyperFSDP."""
    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        return build_optimizer(original, *args, **kwargs)

    return get_megatron_optimizer


_MISSING = object()


def _find(target: Target) -> Any:
    try:
        return getattr(importlib.import_module(target.module), target.attribute, _MISSING)
    except ModuleNotFoundError as error:
        if error.name is not None and target.module.startswith(error.name):
            return _MISSING
        raise


def _problem(target: Target, original: Any) -> str | None:
    if original is _MISSING:
        return "does not exist"
    try:
        have = inspect.signature(original).parameters
    except (TypeError, ValueError):
        return "has no signature that can be read"
    lost = [name for name in target.parameters if name not in have]
    return f"does not take {' and '.join(lost)} (it takes {', '.join(have)})" if lost else _stranger(target)


def _stranger(target: Target) -> str | None:
    """What stands where a function of Megatron should look ``target`` up, and does not."""
    module = sys.modules[target.module]
    for name in target.used_by:
        user = inspect.unwrap(getattr(module, name, None))  # type: ignore[arg-type]
        if getattr(user, "__globals__", None) is not vars(module):
            return f"would not be used: {name}, which uses it, is {_maker(user)} and not Megatron's own"
    return None


def _maker(found: Any) -> str:
    return f"{getattr(found, '__qualname__', found)} of {getattr(found, '__module__', 'an unknown module')}"


def load(spec: str) -> Factory:
    """The factory that ``module:function`` names."""
    module, _, name = spec.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    return factory
