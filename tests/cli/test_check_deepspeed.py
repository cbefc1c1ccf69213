"""`hp-plugin check ds_config.json [--fix]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_plugin.cli.main import app

GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3},
    "hyperfsdp": {"supernode_size": 8},
}
MICS: dict[str, Any] = {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}


def check(path: Path, config: Any, *options: str) -> tuple[int, dict[str, Any]]:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    result = CliRunner().invoke(app, ["check", str(path), "--json", *options])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"told": result.output}


def test_a_good_configuration_is_usable_and_autos_are_listed(tmp_path: Path) -> None:
    code, report = check(tmp_path / "ds.json", GOOD)
    assert (code, report["usable"], report["refused"]) == (0, True, [])
    assert report["filled_in"] == ["train_micro_batch_size_per_gpu"]
    assert report["block"]["supernode_size"] == 8


def test_what_is_refused_and_a_missing_block_make_it_unusable(tmp_path: Path) -> None:
    code, report = check(tmp_path / "ds.json", GOOD | {"amp": {"enabled": True}})
    assert code == 1 and '"amp"' in report["refused"][0]
    code, report = check(tmp_path / "ds.json", {"zero_optimization": {"stage": 3}})
    assert code == 1 and report["block"] is None


def test_fix_rewrites_what_has_a_counterpart_and_keeps_the_original(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    code, report = check(path, MICS)
    assert code == 1 and "mics_shard_size" in report["replaceable"][0] and json.loads(path.read_text()) == MICS
    code, report = check(path, MICS, "--fix")
    assert (code, report["fixed"]) == (0, True)
    assert json.loads(path.read_text()) == {"zero_optimization": {"stage": 3}, "hyperfsdp": {"shard_size": 8}}
    assert json.loads(Path(f"{path}.orig").read_text()) == MICS


@pytest.mark.parametrize(
    ("config", "told"),
    [("{", "cannot be read as JSON"), ([], "holds a list"), ({"hyperfsdp": {"supernode_sise": 2}}, "did you mean")],
)
def test_what_cannot_be_read_is_a_sentence(tmp_path: Path, config: Any, told: str) -> None:
    code, report = check(tmp_path / "ds.json", config)
    assert code == 1 and told in report["told"]


def test_fix_is_for_deepspeed_alone(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text("--use-hyperfsdp")
    result = CliRunner().invoke(app, ["check", str(path), "--fix"])
    assert result.exit_code == 1 and "only" in result.output
