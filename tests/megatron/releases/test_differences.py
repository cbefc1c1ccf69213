"""What the adapter does where releases of megatron.core differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.releases.differences import decouples_weight_decay, groups_in_order


def group(wd_mult: float, lr_mult: float = 1.0) -> dict[str, Any]:
    return {"wd_mult": wd_mult, "lr_mult": lr_mult, "is_expert_parallel": False, "is_decoupled_lr": False}


def test_groups_are_matched_by_their_options_where_megatron_cannot() -> None:
    loaded = [{**group(1.0), "lr": 0.5}, {**group(0.0), "lr": 0.25}]
    assert groups_in_order(SimpleNamespace(), [group(0.0), group(1.0)], loaded) == loaded[::-1]
    assert groups_in_order(SimpleNamespace(), [group(0.0)], loaded) == loaded[1:]


def test_a_group_that_a_checkpoint_lacks_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"no parameter group with .*'lr_mult': 2.0"):
        groups_in_order(SimpleNamespace(), [group(1.0, 2.0)], [group(1.0)])


def test_megatrons_own_matching_is_used_where_it_exists() -> None:
    owner = SimpleNamespace(_filter_and_reorder_param_groups=lambda current, loaded: loaded[::-1])
    assert groups_in_order(owner, [{}, {}], [{"a": 1}, {"b": 2}]) == [{"b": 2}, {"a": 1}]


def test_adam_is_adamw_where_there_is_no_choice() -> None:
    assert decouples_weight_decay(SimpleNamespace())
    assert not decouples_weight_decay(SimpleNamespace(decoupled_weight_decay=False))
