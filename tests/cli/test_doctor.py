"""`hp-plugin doctor`: what it reports and when it calls an installation unusable."""

from __future__ import annotations

import json
import os

import pytest
import torch
from typer.testing import CliRunner

import hp_plugin
from hp_plugin.cli.main import app
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases import versions
from tests.support import run_ranks


def test_json_is_one_object_with_what_was_found() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    # The wheels of the older releases of Megatron have no training loop, and the doctor says so.
    assert report["usable"] is all("megatron.training" not in problem for problem in report["problems"])
    assert result.exit_code == int(not report["usable"]), result.output
    assert report["version"] == hp_plugin.__version__
    assert torch.__version__.startswith(report["packages"]["torch"])
    assert "gloo" in report["backends"]
    assert {kernel["operation"] for kernel in report["kernels"]} >= {"accumulate_scaled_", "scale_copy_"}
    assert report["native_library"]


def test_the_text_names_every_name_that_would_be_replaced() -> None:
    pytest.importorskip("megatron.training", reason="megatron-core with its training loop needs Python 3.12")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in (
        "megatron.training.arguments.parse_args: original",
        "megatron.training.models.dist_utils.DistributedDataParallel: original",
        "megatron.training.training.DDP: original",
        "megatron.training.training.get_megatron_optimizer: original",
    ):
        assert name in result.stdout


def test_an_unsupported_megatron_makes_it_fail_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported() -> str:
        raise UnsupportedError("megatron-core 0.99.0 is installed, but 0.19.x only is supported.")

    monkeypatch.setattr(versions, "megatron_version", lambda: "0.99.0")
    monkeypatch.setattr(versions, "check_megatron", unsupported)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "not usable" in result.stdout
    assert "megatron-core 0.99.0" in result.stdout


def test_the_text_names_what_is_extended_in_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "deepspeed.runtime.engine.DeepSpeedEngine.backward: fits (extended" in result.stdout
    assert "deepspeed.utils.tensor_fragment.safe_get_full_grad: fits (replaced" in result.stdout


def test_a_deepspeed_that_does_not_fit_makes_it_fail_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("deepspeed.runtime.engine")
    monkeypatch.setattr(engine.DeepSpeedEngine, "load_checkpoint", lambda self, directory: None)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert "DeepSpeedEngine.load_checkpoint does not take load_dir" in problem


def test_a_broken_native_library_makes_it_fail_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_plugin.core.kernels import native

    monkeypatch.setenv("HP_NATIVE_LIBRARY", "/does/not/exist.so")
    native.native_status.cache_clear()
    try:
        result = CliRunner().invoke(app, ["doctor", "--json"])
    finally:
        native.native_status.cache_clear()
    assert result.exit_code == 1
    assert any("/does/not/exist.so" in problem for problem in json.loads(result.stdout)["problems"])


def _report_of_a_rank() -> tuple[str, int]:
    from hp_plugin.cli.doctor import examine

    report = examine()
    return report.topology, int(os.environ["RANK"]) - report.rank


@pytest.mark.full
def test_inside_a_job_it_shows_the_topology() -> None:
    for topology, difference in run_ranks(2, _report_of_a_rank, timeout=120):
        assert "1 supernode, 2 ranks" in topology
        assert "ranks 0-1" in topology or "0-1" in topology
        assert difference == 0
