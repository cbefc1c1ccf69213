"""Another program that patches Megatron before us, as MindSpeed's patch manager does on Ascend.

It replaces a function in every module that holds it, by decorators that pass everything on, and sometimes by functions
of its own. Where `MINDSPEED_DIR` names a checkout, its real manager is driven; `StandIn` works alike. Megatron is the
stand-in of `test_targets`, with the recorded signatures of 0.12, for which MindSpeed's maintained branches are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases import rebind
from hp_plugin.megatron.releases.targets import TABLES
from tests.megatron.releases.test_targets import Tree, function, tree

__all__ = ["tree"]  # a fixture

SERIES = (0, 12)
MINDSPEED = os.environ.get("MINDSPEED_DIR")


class StandIn:
    """Collects replacements by full name and applies them: names that end in `wrapper` decorate what is there."""

    def __init__(self) -> None:
        self._patches: list[tuple[str, Callable[..., Any]]] = []

    def register_patch(self, name: str, new: Callable[..., Any]) -> None:
        self._patches.append((name, new))

    def apply_patches(self) -> None:
        for name, new in self._patches:
            module, _, attribute = name.rpartition(".")
            current = getattr(sys.modules[module], attribute)
            final = new(current) if new.__name__.endswith("wrapper") else new
            for each in list(sys.modules.values()):
                if getattr(each, attribute, None) is current:
                    setattr(each, attribute, final)


def real_manager() -> Any:
    path = Path(str(MINDSPEED)) / "mindspeed" / "patch_utils.py"
    spec = importlib.util.spec_from_file_location("mindspeed_patch_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MindSpeedPatchesManager.patches_info = {}
    return module.MindSpeedPatchesManager


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "real", marks=pytest.mark.skipif(not MINDSPEED, reason="MINDSPEED_DIR names no checkout of MindSpeed")
        ),
    ]
)
def manager(request: pytest.FixtureRequest, tree: Tree) -> Any:
    tree(SERIES)
    # Megatron 0.12's initialize holds a copy of parse_args.
    sys.modules["megatron.training.initialize"].parse_args = sys.modules["megatron.training.arguments"].parse_args  # type: ignore[attr-defined]
    return StandIn() if request.param == "stand-in" else real_manager()


def counting_wrapper(calls: list[str]) -> Callable[..., Any]:
    def stub_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append("theirs")
            return original(*args, **kwargs)

        return wrapper

    return stub_wrapper


def lookup(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def passing_on(calls: list[str]) -> Callable[[str], Callable[[Any], Any]]:
    def load(spec: str) -> Callable[[Any], Any]:
        def factory(original: Any) -> Any:
            def ours(*args: Any, **kwargs: Any) -> Any:
                calls.append("ours")
                return original(*args, **kwargs)

            return ours

        return factory

    return load


def test_ours_goes_around_what_was_patched_before(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("arguments.parse_args", "training.train_step", "training.save_checkpoint"):
        manager.register_patch(f"megatron.training.{name}", counting_wrapper(calls))
    manager.apply_patches()
    theirs = lookup("megatron.training.training.train_step")
    monkeypatch.setattr(rebind, "load", passing_on(calls))
    rebinder = rebind.Rebinder("0.12.1", TABLES[SERIES])
    rebinder.activate("arguments")
    for name in ("megatron.training.arguments.parse_args", "megatron.training.initialize.parse_args"):
        calls.clear()
        lookup(name)()
        assert calls == ["ours", "theirs"], name
    rebinder.activate("active")
    calls.clear()
    lookup("megatron.training.training.train_step")()
    assert calls == ["ours", "theirs"]
    rebinder.deactivate("active")
    assert lookup("megatron.training.training.train_step") is theirs


def test_a_function_with_other_parameters_is_refused(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.register_patch("megatron.training.training.train_step", function(["batch", "model"]))
    manager.apply_patches()
    monkeypatch.setattr(rebind, "load", passing_on([]))
    with pytest.raises(UnsupportedError, match=r"train_step of Megatron 0.12.1 does not take forward_step_func"):
        rebind.Rebinder("0.12.1", TABLES[SERIES]).activate("active")


def test_a_get_model_that_does_not_choose_the_class_here_is_refused(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.register_patch("megatron.training.training.get_model", function(["model_provider_func"]))
    manager.apply_patches()
    monkeypatch.setattr(rebind, "load", passing_on([]))
    with pytest.raises(UnsupportedError, match=r"training.DDP of Megatron 0.12.1 would not be used: get_model"):
        rebind.Rebinder("0.12.1", TABLES[SERIES]).activate("active")


def test_a_get_model_that_is_only_decorated_is_accepted(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.register_patch("megatron.training.training.get_model", counting_wrapper([]))
    manager.apply_patches()
    monkeypatch.setattr(rebind, "load", passing_on([]))
    rebinder = rebind.Rebinder("0.12.1", TABLES[SERIES])
    rebinder.activate("active")
    assert all(rebinder.is_rebound(target) for target in TABLES[SERIES] if target.stage == "active")


def test_patches_that_are_applied_over_ours_are_noticed(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebind, "load", passing_on([]))
    rebinder = rebind.Rebinder("0.12.1", TABLES[SERIES])
    rebinder.activate("arguments")
    manager.register_patch("megatron.training.arguments.parse_args", function(["extra_args_provider"]))
    manager.apply_patches()
    with pytest.raises(UnsupportedError, match="parse_args of Megatron 0.12.1 was replaced again"):
        rebinder.activate("active")
