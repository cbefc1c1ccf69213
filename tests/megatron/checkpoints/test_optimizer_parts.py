"""States of optimizers with one part for an optimizer with two, and back: what is not a tensor finds its place."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.optimizer.optimizer import MegatronOptimizer

from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.checkpoints.optimizer_parts import joined, split

OPTIONS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": 1e-3, "min_lr": 1e-4}


def group(*, lr: float, experts: bool = False, **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "lr": lr, "is_expert_parallel": experts, **options}


def saved(*groups: dict[str, Any], step: int = 7, mixed: bool = False) -> dict[str, Any]:
    """What is not a tensor of one optimizer."""
    inner = {"state": {"common_step": step}, "param_groups": list(groups)}
    return {"optimizer": inner, "grad_scaler": {"scale": 8.0}} if mixed else inner


def read(count: int, *, mixed: bool = False) -> dict[str, Any]:
    """What a loading optimizer has asked for and got: tensors, and the numbers of its parameters."""
    inner = {"state": {0: {"exp_avg": "tensor"}}, "param_groups": [{"params": [i]} for i in range(count)]}
    return {"optimizer": inner, "fp32_from_fp16_params": [["master"]]} if mixed else inner


def matched(state: dict[str, Any], *current: dict[str, Any]) -> list[float]:
    """The learning rates that Megatron finds for groups of the loading optimizer."""
    of = state.get("optimizer", state)
    mine = [{**each, "params": []} for each in current]
    return [each["lr"] for each in MegatronOptimizer._filter_and_reorder_param_groups(mine, of["param_groups"])]


@pytest.mark.parametrize("mixed", [False, True])
def test_an_optimizer_with_parts_takes_options_and_step_of_one_without(mixed: bool) -> None:
    whole = saved(group(lr=0.1), group(lr=0.2, wd_mult=0.0), mixed=mixed)
    parts = split({**whole, 0: read(2, mixed=mixed), 1: read(1, mixed=mixed)}, 2)
    assert matched(parts[0], group(lr=0.0), group(lr=0.0, wd_mult=0.0)) == [0.1, 0.2]
    assert matched(parts[1], group(lr=0.0, experts=True)) == [0.1]
    for part in parts:
        inner = part["optimizer"] if mixed else part
        assert inner["state"] == {0: {"exp_avg": "tensor"}, "common_step": 7}
        assert not mixed or (part["grad_scaler"] == {"scale": 8.0} and part["fp32_from_fp16_params"] == [["master"]])


@pytest.mark.parametrize("mixed", [False, True])
def test_an_optimizer_without_parts_takes_those_of_one_with_parts(mixed: bool) -> None:
    dense = saved(group(lr=0.1), group(lr=0.2, wd_mult=0.0), mixed=mixed)
    experts = saved(group(lr=0.3, experts=True), mixed=mixed)
    state = joined({**read(2, mixed=mixed), 0: dense, 1: experts})
    assert matched(state, group(lr=0.0), group(lr=0.0, wd_mult=0.0)) == [0.1, 0.2]
    inner = state["optimizer"] if mixed else state
    assert inner["state"] == {0: {"exp_avg": "tensor"}, "common_step": 7}
    assert not mixed or state["grad_scaler"] == {"scale": 8.0}


def test_states_in_the_same_number_of_parts_are_left_alone() -> None:
    parts = [saved(group(lr=0.1)), saved(group(lr=0.3, experts=True))]
    assert split(dict(enumerate(parts)), 2) == parts
    assert joined(parts[0]) == parts[0]


def test_a_missing_part_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no state for part 1 of the 2 parts"):
        split({0: saved(group(lr=0.1))}, 2)


def test_parts_of_the_distributed_optimizer_find_their_options_too() -> None:
    tensors = {"hyperfsdp_param_state": {0: {"exp_avg": "tensor"}}}
    whole = {"optimizer": {"param_groups": [group(lr=0.1, step=7), group(lr=0.2, wd_mult=0.0, step=7)]}}
    parts = split({**whole, "param_state_sharding_type": "fully_reshardable", 0: tensors, 1: tensors}, 2)
    assert matched(parts[0], group(lr=0.0), group(lr=0.0, wd_mult=0.0)) == [0.1, 0.2]
    assert matched(parts[1], group(lr=0.0, experts=True)) == [0.1]
    experts = {"optimizer": {"param_groups": [group(lr=0.3, experts=True, step=7)]}, "grad_scaler": {"scale": 2.0}}
    state = joined({**tensors, 0: whole, 1: experts})
    assert matched(state, group(lr=0.0), group(lr=0.0, wd_mult=0.0)) == [0.1, 0.2]
    assert state["grad_scaler"] == {"scale": 2.0}
    assert state["hyperfsdp_param_state"] == tensors["hyperfsdp_param_state"]
