"""A plan is read, written and compared as data, and refused where it cannot be right for a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hp_plugin import ConfigurationError, UnsupportedError
from hp_plugin.core.dtensor import ShardingPlan, check_plan, plan_transformer
from hp_plugin.core.dtensor.placement import AxisPlacement
from tests.dtensor.models import Decoder, Shape


def changed(plan: ShardingPlan, *path: str, value: Any) -> ShardingPlan:
    data = plan.to_dict()
    place = data["modules"]
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return ShardingPlan.from_dict(data)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(Shape(tied=True))


@pytest.fixture(scope="module")
def plan(decoder: Decoder) -> ShardingPlan:
    return plan_transformer(decoder, {"tp": 2}, sequence_parallel=True)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_gives_back_the_same_plan(plan: ShardingPlan, tmp_path: Path, suffix: str) -> None:
    plan.save(tmp_path / f"plan.{suffix}")
    read = ShardingPlan.load(tmp_path / f"plan.{suffix}")
    assert read == plan
    assert plan.diff(read) == []


def test_diff_names_the_entry_and_both_values(plan: ShardingPlan) -> None:
    other = changed(plan, "layers.0.mlp", "parameters", "w2.weight", "held", "tp", value="shard(0)")
    assert plan.diff(other) == ["modules / layers.0.mlp / parameters / w2.weight / held / tp: shard(1) -> shard(0)"]


def test_printed_plan_shows_boundaries_and_parameters(plan: ShardingPlan) -> None:
    text = str(plan)
    assert "  in    x: tp: shard(1) -> tp: copy" in text
    assert "  param w2.bias: replicate, used as tp: partial" in text


@pytest.mark.parametrize("text", ["replicate", "copy", "partial", "shard(-1)", "shard(0, blocks=3)"])
def test_placements_are_their_text(text: str) -> None:
    assert str(AxisPlacement.parse(text)) == text


@pytest.mark.parametrize("text", ["shard", "shard(x)", "shard(0, blocks=0)", "Replicate()"])
def test_other_texts_are_no_placements(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a placement"):
        AxisPlacement.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {tp: 2}\nmodul: {}", "modul: Extra inputs"),
        ("axes: {tp: 0}", "axes / tp"),
        ("axes: {tp: 2}\naxes: {tp: 4}", "names 'axes' twice"),
        ("axes: {tp: 2}\nmodules: {a: {inputs: {x: {needs: {tp: shard(q)}}}}}", "a / inputs / x / needs / tp"),
        ("[", "not YAML"),
    ],
)
def test_wrong_files_are_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        ShardingPlan.from_yaml(text)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layers.7",), {}, "module 'layers.7', which the model does not have. Did you mean 'layers."),
        (("norm", "parameters", "wait"), {}, "parameter 'norm.wait', which the model does not have"),
        (("norm", "inputs", "y"), {}, "names input 'y', but forward takes"),
        (("norm", "inputs"), {"input": {"needs": {"cp": "shard(1)"}}}, "axis 'cp' is unknown"),
        (("norm", "inputs"), {"input": {"arrives": {"tp": "copy"}}}, "cannot convert copy to replicate"),
        (("norm", "parameters"), {"weight": {}}, "norm.bias is not covered by the plan"),
        (("layers.0.norm1", "parameters"), {}, "layers.0.norm1.weight is not covered"),
        (("layers.0", "parameters"), {"norm1.weight": {}}, "layers.0.norm1.weight is covered twice"),
        (("norm", "parameters", "weight"), {"held": {"tp": "shard(1)"}}, "has 1 dims, but axis tp divides dim 1"),
        (("norm", "parameters", "weight"), {"held": {"tp": "copy"}}, "is held as copy"),
        (("output", "parameters"), {"weight": {"held": {"tp": "shard(1)"}}}, "are one tied parameter"),
        (("output", "parameters"), {}, "is tied to output.weight, which the plan does not cover"),
        (("layers.0.attention", "divides"), {"n_lives": "tp"}, "attribute 'n_lives', which is None"),
        (("layers.0.mlp", "body"), "vocabulary_embedding", "must be nn.Embedding"),
    ],
)
def test_plans_that_do_not_fit_the_model_are_refused(
    plan: ShardingPlan, decoder: Decoder, path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=re.escape(message)):
        check_plan(decoder, changed(plan, *path, value=value))


@pytest.mark.parametrize(
    ("shape", "tp", "message"),
    [
        (Shape(key_heads=2), 4, "layers.0.attention: n_kv_heads is 2, which axis tp with 4 ranks does not divide"),
        (Shape(vocabulary=63), 2, "parameter tokens.weight has shape (63, 32)"),
        (Shape(width=36, heads=2, key_heads=2), 4, "n_heads is 2"),
    ],
)
def test_sizes_that_the_axis_does_not_divide_are_refused(shape: Shape, tp: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan_transformer(Decoder(shape), {"tp": tp})


def test_a_head_is_never_cut() -> None:
    """Three heads of eight rows over two ranks: 24 rows divide, heads do not."""
    data = {"axes": {"tp": 2}, "modules": {"": {"parameters": {"weight": {"held": {"tp": "shard(0)"}, "unit": 8}}}}}
    with pytest.raises(ConfigurationError, match="has 3 heads of 8 rows, which axis tp with 2 ranks does not divide"):
        check_plan(nn.Linear(4, 24, bias=False), ShardingPlan.from_dict(data))


def test_neighbours_in_a_sequential_must_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    data: dict[str, Any] = {
        "axes": {"tp": 2},
        "modules": {
            "0": {
                "parameters": {"weight": {"held": {"tp": "shard(0)"}}},
                "outputs": {"output": {"produces": {"tp": "shard(-1)"}, "leaves": {"tp": "shard(-1)"}}},
            },
            "1": {"parameters": {"weight": {"held": {"tp": "shard(1)"}}}, "inputs": {"input": {"arrives": {}}}},
        },
    }
    with pytest.raises(ConfigurationError, match=r"output of 0 leaves as tp: shard\(-1\), but input input of 1"):
        check_plan(model, ShardingPlan.from_dict(data))
    data["modules"]["1"]["inputs"]["input"] = {"arrives": {"tp": "shard(-1)"}, "needs": {"tp": "shard(-1)"}}
    check_plan(model, ShardingPlan.from_dict(data))


def test_parameters_without_a_role_are_refused_until_an_override_says() -> None:
    model = Decoder()
    model.layers[0].adapter = nn.Linear(32, 32)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"without a role .*layers\.0\.adapter\.weight"):
        plan_transformer(model, {"tp": 2})
    plan = plan_transformer(model, {"tp": 2}, overrides={"layers.*.adapter": "replicate"})
    assert plan.modules["layers.0.adapter"].parameters["weight"].held == {}
    with pytest.raises(ConfigurationError, match="matches no module"):
        plan_transformer(model, {"tp": 2}, overrides={"layers.*.adaptor": "replicate"})


def test_replicated_layers_are_left_whole() -> None:
    plan = plan_transformer(Decoder(), {"tp": 2}, overrides={"layers.0": "replicate"})
    assert all(not p.held for n, p in plan.placed_parameters().items() if n.startswith("layers.0."))
    assert plan.placed_parameters()["layers.1.mlp.w1.weight"].held["tp"] == AxisPlacement("shard", 0)


def test_multihead_attention_is_refused_by_name() -> None:
    model = Decoder()
    model.layers[0].attention = nn.MultiheadAttention(32, 4)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attention is nn\.MultiheadAttention"):
        plan_transformer(model, {"tp": 2})


def test_a_plan_needs_no_weights() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert plan_transformer(model, {"tp": 2}) == plan_transformer(Decoder(), {"tp": 2})
