"""The plan read from a divided GPT of Megatron says where its weights are and what happens to their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hp_plugin.core.dtensor import ShardingPlan
from tests.megatron.plan import gpt
from tests.support import run_ranks


def run(ranks: int, function: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="megatron", timeout=200.0, **kwargs)


@pytest.mark.parametrize(
    ("name", "tp", "ep", "sequence_parallel"),
    [
        ("dense", 2, 1, True),
        pytest.param("experts", 2, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("dense", 1, 1, False),
                ("dense", 2, 1, False),
                ("gelu", 2, 1, False),
                ("gelu", 2, 1, True),
                ("experts", 1, 2, False),
                ("experts", 1, 4, False),
                ("experts", 2, 1, True),
            ]
        ),
    ],
)
def test_weights_cut_by_the_plan_give_the_gradients_of_one_process(
    name: str, tp: int, ep: int, sequence_parallel: bool
) -> None:
    """Tensor and sequence parallelism, grouped queries, SwiGLU, tied embeddings, routed and shared experts."""
    options = {"name": name, "tp": tp, "ep": ep, "sequence_parallel": sequence_parallel}
    assert run(tp * ep, gpt.check_by_value, **options) == [[]] * (tp * ep)


@pytest.mark.full
def test_a_wrong_block_is_seen() -> None:
    with pytest.raises(Exception, match="AssertionError|not close"):
        run(2, gpt.check_by_value, name="dense", tp=2, ep=1, sequence_parallel=False, wrong=True)


@pytest.mark.full
def test_plans_can_be_saved_and_compared(tmp_path: Path) -> None:
    whole, divided = (run(2, gpt.read_plan, name="dense", tp=2, sequence_parallel=sp) for sp in (False, True))
    assert whole[0] == whole[1]
    divided[0].save(tmp_path / "plan.yaml")
    assert ShardingPlan.load(tmp_path / "plan.yaml") == divided[1]
    lines = whole[0].diff(divided[0])
    norm = "modules / decoder.layers.0.input_layernorm / parameters / weight"
    assert f"{norm}: replicate -> absent" in lines
    assert f"{norm} / used / tp: absent -> copy" in lines
    assert not any("linear_" in line for line in lines), "sequence parallelism moves no weight"


@pytest.mark.full
@pytest.mark.parametrize(("name", "ep"), [("dense", 1), ("gelu", 1), ("experts", 2)])
def test_megatron_and_the_planner_differ_only_where_the_stream_is_divided(name: str, ep: int) -> None:
    """One reads attributes of the divided model, the other the structure of the whole one."""
    theirs = run(2 * ep, gpt.read_plan, name=name, tp=2, ep=ep, sequence_parallel=True)[0]
    ours = run(1, gpt.planner_plan, name=name, tp=2, ep=ep)[0]
    where = {line.split(" / ")[1] for line in ours.diff(theirs)}
    # Megatron divides the stream in its embedding; the planner where the first layer begins, and it names the logits.
    assert where == {"decoder.layers.0", "embedding", ""}


@pytest.mark.full
def test_jobs_that_a_plan_cannot_say_are_refused_by_name() -> None:
    found = run(2, gpt.refusals)[0]
    assert "divided over 1 tensor-parallel ranks and everything else over 2" in found["etp"]
    assert "2 pipeline stages" in found["pp"]
