"""Models that are planned rightly give no finding, whatever their structure, and every operation is followed."""

from __future__ import annotations

import json

import pytest
import torch

from hp_plugin.core.dtensor import plan_transformer, simulate
from tests.dtensor.models import Shape, make_batch, make_decoder

SHAPES = {
    "dense": Shape(),
    "grouped_queries": Shape(heads=8, key_heads=4, bias=False),
    "tied": Shape(tied=True),
    "head_norms": Shape(head_norms=True),
    "fused": Shape(fused=True),
    "experts": Shape(experts=4, tied=True),
}
QUICK = [
    ("dense", 2, False, False),
    ("grouped_queries", 4, True, True),
    ("experts", 2, True, False),
    ("fused", 4, False, True),
    ("head_norms", 2, True, True),
]
ALL = [
    (name, ranks, sequence, loss)
    for name in SHAPES
    for ranks in (1, 2, 4)
    for sequence in (False, True)
    for loss in (False, True)
]


@pytest.mark.parametrize(
    ("name", "ranks", "sequence", "loss"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in ALL if case not in QUICK)],
)
def test_a_clean_model_gives_no_finding(name: str, ranks: int, sequence: bool, loss: bool) -> None:
    shape = SHAPES[name]
    plan = plan_transformer(make_decoder(shape), {"tp": ranks}, sequence_parallel=sequence, loss_parallel=loss)
    report = simulate(lambda: make_decoder(shape), plan, make_batch(shape), timeout_s=60.0)
    report.raise_if_different()
    assert report.location is None
    assert not report.unchecked
    assert report.parameters == len(list(make_decoder(shape).parameters()))
    # Every module with operations was followed, and the products are where the plan puts them.
    by_module = {(o.module, o.op): o.placements for o in report.operations}
    if ranks > 1:
        stream = "tp: shard(1)" if sequence else "tp: replicate"
        assert by_module["norm", "layer_norm"] == (stream,)
        assert by_module["output", "linear"] == ("tp: shard(2)",)
        assert by_module["", "loss"] == ("tp: replicate",)
        # Each row-parallel product gives a sum.
        if "experts" not in name:
            last = "proj" if name == "fused" else "wo"
            assert by_module[f"layers.1.attention.{last}", "linear"] == ("tp: partial",)


def test_half_precision_is_followed_too() -> None:
    plan = plan_transformer(make_decoder(), {"tp": 2}, sequence_parallel=True)
    report = simulate(make_decoder, plan, make_batch(), dtype=torch.bfloat16)
    report.raise_if_different()


def test_the_report_is_readable_and_json() -> None:
    plan = plan_transformer(make_decoder(), {"tp": 2})
    report = simulate(make_decoder, plan, make_batch())
    text = str(report)
    assert "on simulated ranks, tp=2" in text
    assert text.endswith("no fault.")
    again = json.loads(json.dumps(report.to_dict()))
    assert again["equal"] is True
    assert again["axes"] == {"tp": 2}
    assert again["operations"][0] == {
        "module": "tokens",
        "op": "region",
        "how": "region",
        "placements": ["tp: replicate"],
        "note": "",
    }
