"""Models of transformers are followed through their own forward and their own loss."""

from __future__ import annotations

import pytest
import torch

from hp_plugin.core.dtensor import plan_transformer, simulate
from tests.dtensor.test_transformers import make_model

pytest.importorskip("transformers")

CASES = [
    (family, divided)
    for family in ("llama", "qwen2", "qwen3", "mixtral", "gpt2")
    for divided in (False, True)
    if not (family == "gpt2" and divided)
]


@pytest.mark.parametrize(
    ("family", "divided"),
    [pytest.param(*case, marks=() if case == ("llama", True) else pytest.mark.full) for case in CASES],
)
def test_a_clean_model_gives_no_finding(family: str, divided: bool) -> None:
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    plan = plan_transformer(make_model(family), {"tp": 2}, sequence_parallel=divided, loss_parallel=True)
    report = simulate(lambda: make_model(family), plan, {"input_ids": ids, "labels": ids})
    report.raise_if_different()
    assert not report.unchecked
    assert report.parameters == len(list(make_model(family).parameters()))
    assert [o.how for o in report.operations if o.op == "loss"] == ["region"]
