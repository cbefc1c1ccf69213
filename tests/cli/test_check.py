"""`hp-plugin check`: what becomes of the arguments of a Megatron job, with the exit status of a verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hp_plugin.cli.main import app
from hp_plugin.megatron.releases import versions

FINE = "--num-layers 4 --bf16 --use-distributed-optimizer --ddp-bucket-size 1000 --main-grads-dtype bf16"


def run(directory: Path, text: str, *options: str, name: str = "args.txt") -> Any:
    path = directory / name
    path.write_text(text)
    return CliRunner().invoke(app, ["check", str(path), *options])


def report(directory: Path, text: str) -> dict[str, Any]:
    result = run(directory, text, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if found["usable"] else 1)
    return found


def flags(findings: list[dict[str, str]]) -> list[str]:
    return [finding["flag"] for finding in findings]


def test_flags_are_sorted_by_what_becomes_of_them(tmp_path: Path) -> None:
    found = report(tmp_path, f"{FINE} --my-flag 3 --nproc-per-node 2 --save $OUT")
    assert found["usable"] and found["assumed"] and found["switches"] == ["--use-hyperfsdp"]
    assert flags(found["switched_off"]) == ["--use-distributed-optimizer"]
    assert flags(found["without_effect"]) == ["--ddp-bucket-size 1000"]
    assert flags(found["replaced"]) == ["--main-grads-dtype bf16"]
    assert found["works"] == ["--num-layers 4", "--bf16", "--save $OUT"]
    assert (found["unknown"], found["unresolved"], found["refused"]) == (["--my-flag"], ["--save $OUT"], [])


def test_a_refused_flag_is_told_with_advice(tmp_path: Path) -> None:
    found = report(tmp_path, "--use-hyperfsdp --ckpt-format torch --cuda-graph-impl none --fp8-format hybrid")
    assert not found["assumed"]
    assert flags(found["refused"]) == ["--ckpt-format torch", "--fp8-format hybrid"]
    assert "use --ckpt-format torch_dist" in found["refused"][0]["reason"]
    assert found["works"] == ["--cuda-graph-impl none"]


def test_options_of_ours_are_judged_too(tmp_path: Path) -> None:
    found = report(tmp_path, "--use-hyperfsdp --hyperfsdp-transport tcp --num-layers 4")
    assert "--hyperfsdp-transport is 'tcp'; expected" in found["refused"][0]["reason"]
    found = report(tmp_path, "--use-hyperfsdp --hyperfsdp-supernode-siz 4 --num-layers 4")
    assert "did you mean --hyperfsdp-supernode-size" in found["refused"][0]["reason"]
    assert report(tmp_path, "--use-hyperfsdp --hyperfsdp-supernode-size 4 --num-layers 4")["refused"] == []


def test_muon_on_stock_ddp_is_judged_by_its_own_rules(tmp_path: Path) -> None:
    found = report(tmp_path, "--use-hypermuon --use-distributed-optimizer --ddp-bucket-size 1000")
    assert flags(found["refused"]) == ["--use-distributed-optimizer"]
    assert found["works"] == ["--ddp-bucket-size 1000"]


def test_a_value_that_is_missing_is_told(tmp_path: Path) -> None:
    assert flags(report(tmp_path, "--num-layers --swiglu")["refused"]) == ["--num-layers"]


def test_it_needs_no_megatron_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "megatron_version", lambda: None)
    imported = {name for name in sys.modules if name.split(".")[0] == "megatron"}
    found = report(tmp_path, FINE)
    assert found["megatron"].startswith("Megatron-LM is not installed here; flags are compared with those of")
    assert {name for name in sys.modules if name.split(".")[0] == "megatron"} == imported


def test_people_read_reasons_counts_and_a_verdict(tmp_path: Path) -> None:
    fine = run(tmp_path, FINE)
    assert fine.exit_code == 0
    assert "accepted and switched off\n  --use-distributed-optimizer: HyperFSDP shards" in fine.stdout
    assert "2 flags work as they are\na job with these arguments starts" in fine.stdout
    refused = run(tmp_path, "--yaml-cfg x")
    assert refused.exit_code == 1
    assert "1 refused: the job does not start until they are changed" in refused.stdout


@pytest.mark.parametrize(("name", "what"), [("none.txt", "has no flag")])
def test_a_file_that_cannot_be_judged_is_an_error(tmp_path: Path, name: str, what: str) -> None:
    result = run(tmp_path, "{}", name=name)
    assert result.exit_code == 1
    assert what in result.stderr and not result.stdout
