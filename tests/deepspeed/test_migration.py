"""Configurations of MiCS, hpZ and Muon become configurations that HyperFSDP accepts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hp_plugin.deepspeed.migration import migrate
from hp_plugin.deepspeed.refusals import check_config
from hp_plugin.deepspeed.schema import read_block


def zero(**options: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **options}}


@pytest.mark.parametrize(
    ("config", "block"),
    [
        (zero(mics_shard_size=8, mics_hierarchical_params_gather=True), {"shard_size": 8}),
        (zero(zero_hpz_partition_size=8), {"shard_size": "world", "reshard_after_forward": 8}),
        (zero(mics_shard_size=-1), {}),
        (zero(), {}),
        (zero(mics_shard_size=4) | {"hyperfsdp": {"shard_size": 2}}, {"shard_size": 2}),
    ],
)
def test_what_has_a_counterpart_is_replaced(config: dict[str, Any], block: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    migrated = migrate(config)
    assert config == before
    assert migrated.config["hyperfsdp"] == block and migrated.changes
    assert migrated.config["zero_optimization"] == {"stage": 3}
    check_config(migrated.config)
    assert read_block(migrated.config) is not None
    assert migrate(migrated.config).changes == (), "a second pass finds nothing to do"


def test_muon_becomes_hyper_muon() -> None:
    params = {"muon_lr": 0.02, "adam_lr": 3e-4, "ns_method": "gram"}
    migrated = migrate(zero() | {"optimizer": {"type": "Muon", "params": params}})
    assert migrated.config["optimizer"] == {"type": "HyperMuon", "params": {"lr": 0.02, "adam_lr": 3e-4}}
    check_config(migrated.config)


def test_other_stages_are_left_alone() -> None:
    config = {"zero_optimization": {"stage": 2}}
    assert migrate(config).config == config and migrate(config).changes == ()
