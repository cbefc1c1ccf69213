"""What ``install()`` replaces in Megatron, when, and that nothing else changes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import pytest

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases import rebind, versions
from tests.megatron.cases import tiny_job
from tests.support import run_ranks

ARGUMENT_HOOK = "megatron.training.arguments.parse_args"
INSTALLED = versions.series(versions.megatron_version() or "0.19.2")
TARGETS = rebind.TABLES[INSTALLED]
ACTIVE_TARGETS = [target.name for target in TARGETS if target.stage in ("optimizer", "active")]


def objects_behind_targets() -> dict[str, int]:
    """Identity of every target, looked up as Megatron looks it up."""
    import importlib

    return {target.name: id(getattr(importlib.import_module(target.module), target.attribute)) for target in TARGETS}


def parse(*words: str) -> Any:
    from megatron.training import arguments

    sys.argv = ["train.py", *tiny_job(*words)]
    return arguments.parse_args()


def replaced_after(*, commands: list[list[str]]) -> list[list[str]]:
    """Names whose object is not Megatron's own: before install, after it, after each command line, at the end."""
    import hp_plugin.megatron

    stock = objects_behind_targets()

    def replaced() -> list[str]:
        now = objects_behind_targets()
        return sorted(name for name in stock if now[name] != stock[name])

    seen = [replaced()]
    hp_plugin.megatron.install()
    seen.append(replaced())
    for words in commands:
        parse(*words)
        seen.append(replaced())
        assert replaced() == sorted(hp_plugin.megatron.rebound_names())
    hp_plugin.megatron.uninstall()
    seen.append(replaced())
    return seen


def test_only_the_argument_hook_is_replaced_until_a_job_asks_for_hyperfsdp() -> None:
    off, on, watch = [], ["--use-hyperfsdp"], ["--use-hyperfsdp", "--hyperfsdp-migrate", "observe"]
    (seen,) = run_ranks(1, replaced_after, flavour="megatron", commands=[off, on, on, watch, off])
    everything = sorted([ARGUMENT_HOOK, *ACTIVE_TARGETS])
    watched = sorted([ARGUMENT_HOOK, *(target.name for target in TARGETS if target.stage == "observe")])
    assert seen == [[], [ARGUMENT_HOOK], [ARGUMENT_HOOK], everything, everything, watched, [ARGUMENT_HOOK], []]


def second_install() -> bool:
    import hp_plugin.megatron

    hp_plugin.megatron.install()
    first = objects_behind_targets()
    hp_plugin.megatron.install()
    return objects_behind_targets() == first


def test_a_second_install_changes_nothing() -> None:
    assert run_ranks(1, second_install, flavour="megatron") == [True]


def arguments_with_and_without() -> tuple[dict[str, Any], dict[str, Any]]:
    """The namespace of a stock command line, parsed by Megatron alone and with the hook in place."""
    from megatron.training import arguments

    import hp_plugin.megatron
    from hp_plugin.megatron.arguments import flags, muon_flags

    words = [word for word in tiny_job() if word not in ("--hyperfsdp-device", "cpu")]
    sys.argv = ["train.py", *words]
    alone = vars(arguments.parse_args())
    hp_plugin.megatron.install()
    hooked = vars(arguments.parse_args())
    ours = {f"hyperfsdp_{name}" for name in (*flags.HyperFSDPOptions.model_fields, "config")}
    ours |= {f"hypermuon_{name}" for name in muon_flags.HyperMuonOptions.model_fields}
    ours |= {"use_hyperfsdp", "use_hypermuon"}
    return alone, {name: value for name, value in hooked.items() if name not in ours}


def test_a_stock_command_line_is_parsed_as_by_megatron_alone() -> None:
    ((alone, hooked),) = run_ranks(1, arguments_with_and_without, flavour="megatron")
    assert hooked == alone


def selector_facts() -> dict[str, bool]:
    from megatron.core.distributed import DistributedDataParallel as Stock

    import hp_plugin.megatron

    hp_plugin.megatron.install()
    parse("--use-hyperfsdp")
    from megatron.training import training

    from hp_plugin.megatron.fsdp.data_parallel import hyperfsdp_class

    stock, ours = Stock.__new__(Stock), hyperfsdp_class().__new__(hyperfsdp_class())
    return {
        "stock is a DDP": isinstance(stock, training.DDP),
        "ours is a DDP": isinstance(ours, training.DDP),
        "ours subclasses DDP": issubclass(hyperfsdp_class(), training.DDP),
        "the name in core is untouched": sys.modules["megatron.core.distributed"].DistributedDataParallel is Stock,
    }


def test_the_stand_in_for_ddp_still_means_ddp_to_isinstance() -> None:
    (facts,) = run_ranks(1, selector_facts, flavour="megatron")
    assert facts == {
        "stock is a DDP": True,
        "ours is a DDP": False,
        "ours subclasses DDP": False,
        "the name in core is untouched": True,
    }


def refused(*, words: list[str], change: str | None = None) -> tuple[int, str, list[str]]:
    """Exit status, standard error and replaced names after a command line that is refused."""
    from megatron.training import training

    import hp_plugin.megatron

    if change == "signature":
        training.get_megatron_optimizer = lambda config, chunks: None
    hp_plugin.megatron.install()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            parse(*words)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, errors.getvalue(), hp_plugin.megatron.rebound_names()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--use-hyperfsdp", "--hyperfsdp-supernode-size", "3"],
            "--hyperfsdp-supernode-size 3 does not divide the 2 ranks",
        ),
        (["--use-hyperfsdp", "--ckpt-format", "torch"], "cannot be combined with --ckpt-format torch"),
        (["--hyperfsdp-shard-size", "2"], "--hyperfsdp-shard-size has no effect without --use-hyperfsdp"),
        (["--use-hyperfsdp", "--hyperfsdp-sharding", "2"], "--hyperfsdp-sharding is not a known flag"),
        (["--use-hypermuon", "--optimizer", "sgd"], "--use-hypermuon cannot be combined with --optimizer"),
    ],
)
def test_a_refused_command_line_ends_every_rank_with_one_sentence_from_rank_0(words: list[str], sentence: str) -> None:
    first, second = run_ranks(2, refused, flavour="megatron", words=words)
    assert (first[0], second[0]) == (2, 2)
    assert first[1].startswith("hp_plugin: error: ")
    assert sentence in first[1]
    assert first[1].count("\n") == 1
    assert second[1] == ""
    assert first[2] == [ARGUMENT_HOOK]


def test_a_changed_signature_is_refused_with_target_and_version() -> None:
    ((status, message, rebound),) = run_ranks(
        1, refused, flavour="megatron", words=["--use-hyperfsdp"], change="signature"
    )
    assert status == 2
    assert f"megatron.training.training.get_megatron_optimizer of Megatron {versions.megatron_version()}" in message
    assert "does not take model_chunks and config_overrides and pg_collection" in message
    assert rebound == [ARGUMENT_HOOK]


class TestVersions:
    @pytest.mark.parametrize("version", ["0.11.0", "0.15.3", "0.20.0", "1.0.0rc1"])
    def test_another_release_is_refused_with_both_versions(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(versions, "megatron_version", lambda: version)
        supported = "0.12.x, 0.16.x, 0.17.x, 0.18.x and 0.19.x"
        with pytest.raises(UnsupportedError, match=f"megatron-core {version} is installed.*supports {supported} only"):
            versions.check_megatron()

    @pytest.mark.parametrize("release", [release.verified for release in versions.RELEASES.values()])
    def test_every_verified_release_is_accepted(self, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
        monkeypatch.setattr(versions, "megatron_version", lambda: release)
        monkeypatch.setattr(versions, "has_training", lambda: True)
        monkeypatch.setattr(versions.sys, "version_info", (3, 12, 0))
        assert versions.check_megatron() == release

    def test_a_missing_megatron_is_told_with_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "megatron_version", lambda: None)
        with pytest.raises(UnsupportedError, match=r"Megatron-LM was not found.*pip install"):
            versions.check_megatron()

    @pytest.mark.parametrize(("release", "needs"), [("0.19.2", "3.12"), ("0.12.1", "3.10")])
    def test_an_old_python_is_told(self, monkeypatch: pytest.MonkeyPatch, release: str, needs: str) -> None:
        monkeypatch.setattr(versions, "megatron_version", lambda: release)
        monkeypatch.setattr(versions.sys, "version_info", (3, 9, 1))
        with pytest.raises(UnsupportedError, match=rf"{release} needs Python >= {needs}, but this is Python 3.9.1"):
            versions.check_megatron()

    @pytest.mark.parametrize(
        ("release", "advice"),
        [("0.18.2", r"pip install"), ("0.16.1", "The wheels of this series hold megatron.core only")],
    )
    def test_a_wheel_without_the_training_package_is_told(
        self, monkeypatch: pytest.MonkeyPatch, release: str, advice: str
    ) -> None:
        monkeypatch.setattr(versions, "megatron_version", lambda: release)
        monkeypatch.setattr(versions, "has_training", lambda: False)
        monkeypatch.setattr(versions.sys, "version_info", (3, 12, 0))
        with pytest.raises(UnsupportedError, match=f"without the module megatron.training.*{advice}"):
            versions.check_megatron()

    def test_the_installed_version_is_found_without_importing_megatron(self) -> None:
        version = versions.megatron_version()
        assert version is not None
        assert versions.series(version) in versions.SUPPORTED


class TestTable:
    def test_it_is_data_and_imports_nothing_of_megatron(self) -> None:
        code = (
            "import sys, json; from hp_plugin.megatron import rebinding_table; table = rebinding_table(); "
            "print(json.dumps([sorted(m for m in sys.modules if m.startswith('megatron')), table]))"
        )
        import json
        import subprocess

        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        imported, table = json.loads(done.stdout)
        assert not [name for name in imported if name.startswith("megatron.")]
        assert [entry["target"] for entry in table] == [target.name for target in TARGETS]
        assert {entry["state"] for entry in table} == {"not inspected"}

    def test_inspection_finds_every_target_of_the_installed_release(self) -> None:
        (table,) = run_ranks(1, inspected_table, flavour="megatron")
        assert {entry["state"] for entry in table} == {"original"}


def inspected_table() -> list[dict[str, str]]:
    from hp_plugin.megatron import rebinding_table

    return rebinding_table(inspect_targets=True)
