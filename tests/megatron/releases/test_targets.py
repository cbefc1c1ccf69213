"""The table of rebinding targets, for every supported release: against recorded signatures and a stand-in for Megatron.

The stand-in is a tree of empty modules with functions of the recorded signatures, so no release needs to be installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.cpu_compat import megatron_names
from hp_plugin.megatron.releases import rebind, versions
from hp_plugin.megatron.releases.targets import TABLES, Stage
from tests.megatron.releases import checkout
from tests.megatron.releases.signatures import parameters, recorded, series_of

ALL = sorted(TABLES)
Tree = Callable[[tuple[int, int]], None]


def function(words: list[str], namespace: dict[str, Any] | None = None, name: str = "stand_in") -> Any:
    """A function that takes the parameters `words`, all optional; with a namespace it is defined there."""
    spelled = [word if word.startswith("*") else f"{word}=None" for word in words]
    namespace = {} if namespace is None else namespace
    exec(f"def {name}({', '.join(spelled)}): pass", namespace)
    return namespace[name]


def define(module: str, name: str, words: list[str]) -> None:
    """Defines a function in a module, as its own."""
    function(words, vars(sys.modules[module]), name)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Puts modules with the recorded targets of a release where Megatron would be."""

    def build(series: tuple[int, int]) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        for target in TABLES[series]:
            module = ""
            for part in target.module.split("."):
                module = f"{module}.{part}" if module else part
                if module not in sys.modules:
                    monkeypatch.setitem(sys.modules, module, ModuleType(module))
            define(target.module, target.attribute, recorded()[series][target.name])
        names = {target.name for target in TABLES[series]}
        for target in TABLES[series]:
            for user in target.used_by:
                if f"{target.module}.{user}" not in names:
                    define(target.module, user, [])

    return build


def test_every_supported_release_has_a_table_a_record_and_what_it_needs_on_cpu() -> None:
    assert sorted(versions.RELEASES) == ALL == sorted(recorded()) == sorted(megatron_names.STEPS)


@pytest.mark.parametrize("series", ALL)
class TestTable:
    def test_every_target_is_recorded_with_the_parameters_that_its_replacement_relies_on(
        self, series: tuple[int, int]
    ) -> None:
        for target in TABLES[series]:
            assert set(target.parameters) <= set(recorded()[series][target.name]), target.name
        assert len({(target.name, target.stage) for target in TABLES[series]}) == len(TABLES[series])

    def test_every_replacement_exists(self, series: tuple[int, int]) -> None:
        for target in TABLES[series]:
            module, _, name = target.factory.partition(":")
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            assert f"def {name}(" in Path(spec.origin).read_text()

    def test_the_loop_and_the_parser_of_the_release_are_covered(self, series: tuple[int, int]) -> None:
        names = {target.name for target in TABLES[series]}
        assert ("megatron.training.initialize.parse_args" in names) == (series < (0, 18))
        assert ("megatron.training.models.dist_utils.DistributedDataParallel" in names) == (series >= (0, 18))
        assert {"megatron.training.training.DDP", "megatron.training.training.get_megatron_optimizer"} <= names

    def test_all_targets_of_an_unchanged_release_are_found_and_replaced(
        self, series: tuple[int, int], tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree(series)
        assert {entry["state"] for entry in rebind.describe(series, inspect_targets=True)} == {"original"}
        new = object()
        monkeypatch.setattr(rebind, "load", lambda spec: lambda original: new)
        rebinder = rebind.Rebinder("as recorded", TABLES[series])
        for stage in get_args(Stage):
            rebinder.activate(stage)
            for target in TABLES[series]:
                replaced = getattr(sys.modules[target.module], target.attribute) is new
                assert replaced == any(t.name == target.name and t.stage == stage for t in TABLES[series])
            rebinder.deactivate(stage)

    def test_a_changed_signature_is_refused_with_target_and_version_and_nothing_is_replaced(
        self, series: tuple[int, int], tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rebind, "load", lambda spec: lambda original: object())
        for changed in TABLES[series]:
            tree(series)
            words = [word for word in recorded()[series][changed.name] if word != changed.parameters[0]]
            define(changed.module, changed.attribute, words)
            before = {t.name: getattr(sys.modules[t.module], t.attribute) for t in TABLES[series]}
            version = f"{versions.RELEASES[series].verified}+local"
            with pytest.raises(UnsupportedError) as refusal:
                rebind.Rebinder(version, TABLES[series]).activate(changed.stage)
            assert f"{changed.name} of Megatron {version} does not take {changed.parameters[0]}" in str(refusal.value)
            assert all(getattr(sys.modules[t.module], t.attribute) is before[t.name] for t in TABLES[series])

    def test_a_missing_name_is_refused(self, series: tuple[int, int], tree: Tree) -> None:
        tree(series)
        gone = TABLES[series][0]
        delattr(sys.modules[gone.module], gone.attribute)
        with pytest.raises(UnsupportedError, match=f"{gone.name} of Megatron 0.0.0 does not exist"):
            rebind.Rebinder("0.0.0", TABLES[series]).activate("arguments")

    def test_the_other_argument_style_does_not_pass_for_this_release(self, series: tuple[int, int], tree: Tree) -> None:
        other = (0, 19) if series < (0, 18) else (0, 17)
        tree(other)
        states = [entry["state"] for entry in rebind.describe(series, inspect_targets=True)]
        assert any(state != "original" for state in states)


def sources() -> list[Path]:
    """Folders with Megatron's sources on this machine: what pip has installed, and the checkout."""
    spec = importlib.util.find_spec("megatron")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [Path(place).parent for place in places if (Path(place) / "training").is_dir()]
    if checkout.reason_to_skip() is None:
        found.append(checkout.folder())
    return [root for root in dict.fromkeys(found) if series_of(root) in TABLES]


def test_the_record_is_what_the_installed_sources_say() -> None:
    if not sources():
        pytest.skip("no megatron.training of a supported release is installed")
    for root in sources():
        series = series_of(root)
        for target in TABLES[series]:
            assert parameters(root, target.module, target.attribute) == recorded()[series][target.name], target.name


def test_targets_are_data() -> None:
    for table in TABLES.values():
        for target in table:
            assert dataclasses.is_dataclass(target)
            assert target.purpose
            assert target.parameters
