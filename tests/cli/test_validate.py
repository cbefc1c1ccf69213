"""`hp-plugin validate`: a plan and its model from files and options, the verdict as exit status, text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hp_plugin.cli.main import app
from hp_plugin.core.dtensor import ShardingPlan

MODEL = "tests.dtensor.models:make_decoder"


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["validate", *options])


def config(directory: Path, **content: Any) -> str:
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump({"model": {"factory": MODEL}, "batch": {"rows": 2, "sequence": 8}, **content}))
    return str(path)


def test_a_plan_made_from_the_model_is_equal_and_can_be_saved(tmp_path: Path) -> None:
    saved = tmp_path / "plan.yaml"
    file = config(
        tmp_path,
        parallelism={"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
        topology={"supernode_size": 2},
        sequence_parallel=True,
        loss_parallel=True,
    )
    result = run("--config", file, "--save-plan", str(saved), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["equal"]
    assert found["simulation"]["axes"] == {"tp": 2}
    assert found["simulation"]["parameters"] > 10
    assert found["unplanned"] == ["pipeline_parallel_degree 2 is not part of the plan and was not validated"]
    again = run("--plan", str(saved), "--model", MODEL, "--rows", "2", "--sequence", "8")
    assert again.exit_code == 0, again.output
    assert "no fault" in again.stdout


def test_a_wrong_plan_is_named_with_module_and_placements(tmp_path: Path) -> None:
    """The bias behind a row-parallel product is added by every rank."""
    assert (
        run(
            "--config",
            config(tmp_path, parallelism={"tensor_parallel_degree": 2}),
            "--save-plan",
            str(tmp_path / "plan.yaml"),
        ).exit_code
        == 0
    )
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    owner, name = next(
        (entry, name)
        for module, entry in plan["modules"].items()
        for name, parameter in entry.get("parameters", {}).items()
        if f"{module}.{name}".startswith("layers.1.attention.wo") and name.endswith("bias") and "used" in parameter
    )
    owner["parameters"][name].pop("used")
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(plan))
    assert ShardingPlan.load(tmp_path / "wrong.yaml")
    result = run("--config", config(tmp_path), "--plan", str(tmp_path / "wrong.yaml"))
    assert result.exit_code == 1
    assert "layers.1.attention" in result.stdout
    assert "does not compute" in result.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "name one model"),
        (["--model", "tests.nowhere:make"], "cannot be imported"),
        (["--model", "tests.dtensor.models:MODEL"], "cannot be imported"),
        (["--model", "tests.dtensor"], "no config.json"),
        (["--model", MODEL, "--plan", "nowhere.yaml"], "cannot be read"),
        (["--model", MODEL, "--sequence", "99"], "the model fails on the batch"),
        (["--config", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(options: list[str], sentence: str) -> None:
    result = run(*options)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert not result.stdout


def test_an_unknown_key_of_the_configuration_is_named(tmp_path: Path) -> None:
    result = run("--config", config(tmp_path, parallelism={"tensor_parallel_degre": 2}))
    assert result.exit_code == 1
    assert "parallelism.tensor_parallel_degre" in result.stderr
