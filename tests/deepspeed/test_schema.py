"""The block is validated strictly, and what does not work is refused by name with what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from hp_plugin.deepspeed.refusals import REFUSALS, check_config, refused
from hp_plugin.deepspeed.schema import read_block
from hp_plugin.errors import ConfigurationError, UnsupportedError


def test_defaults_are_those_of_the_documentation() -> None:
    block = read_block({"hyperfsdp": {}})
    assert block is not None
    assert (block.supernode_size, block.shard_size, block.reshard_after_forward) == ("auto", "supernode", True)
    assert (block.transport, block.mode, block.optimizer_sharding) == ("auto", "production", "auto")


@pytest.mark.parametrize("config", [{}, {"hyperfsdp": {"enabled": False}}, {"zero_optimization": {"stage": 3}}])
def test_without_an_enabled_block_there_is_none(config: dict[str, Any]) -> None:
    assert read_block(config) is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"supernode_sise": 2}, 'unknown key "supernode_sise".*did you mean supernode_size'),
        ({"zzz": 2}, 'unknown key "zzz".*known are enabled, supernode_size'),
        ({"supernode_size": "2"}, '"hyperfsdp.supernode_size" is \'2\'; expected a number of ranks or "auto"'),
        ({"supernode_size": 0}, "hyperfsdp.supernode_size"),
        ({"shard_size": "node"}, 'expected a number of ranks, "supernode" or "world"'),
        ({"transport": "ring"}, "hyperfsdp.transport"),
        ({"enabled": "yes"}, "expected true or false"),
        ({"units": 3}, "list of names of module classes"),
        (3, "must be an object"),
    ],
)
def test_what_does_not_fit_is_named(block: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_block({"hyperfsdp": block})


@pytest.mark.parametrize("name", ["hyper_fsdp", "HyperFSDP", "hyperfsdb", "hyperfdsp"])
def test_a_misspelt_block_is_not_ignored(name: str) -> None:
    with pytest.raises(ConfigurationError, match='did you mean "hyperfsdp"'):
        read_block({name: {"supernode_size": 2}})


EXAMPLES: dict[str, Any] = {
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_optimizer": {"device": "nvme"},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zero_hpz_partition_size": 4,
    "zero_optimization.mics_shard_size": 4,
    "hybrid_engine": {"enabled": True},
    "tensor_parallel.autotp_size": 2,
    "sequence_parallel_size": 2,
    "data_types.grad_accum_dtype": "bf16",
    "data_types.buffer_dtype": "fp32",
    "data_types.keep_in_fp32_modules": ["norm"],
    "torch_autocast.dtype": "fp16",
    "compression_training": {},
    "gradient_allreduce_op": "sum",
}
HARMLESS: dict[str, Any] = {
    "zero_optimization.offload_param": {"device": "none"},
    "zero_optimization.offload_optimizer": {"device": "none"},
    "zero_optimization.zenflow": None,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "hybrid_engine": {"enabled": False},
    "tensor_parallel.autotp_size": 0,
    "sequence_parallel_size": 1,
    "data_types.grad_accum_dtype": "fp32",
    "data_types.buffer_dtype": None,
    "data_types.keep_in_fp32_modules": [],
    "torch_autocast.dtype": "bfloat16",
    "compression_training": None,
    "gradient_allreduce_op": "mean",
    "optimizer.type": "AdamW",
}


def nested(path: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return config


@pytest.mark.parametrize("path", sorted({refusal.path for refusal in REFUSALS} - {"optimizer.type"}))
def test_every_refused_feature_is_refused_by_name_and_only_when_asked_for(path: str) -> None:
    asked = list(refused(nested(path, EXAMPLES.get(path, True))))
    assert [found for found, _ in asked] == [path]
    assert f'"{path}"' in asked[0][1] and "; " in asked[0][1]
    assert list(refused(nested(path, HARMLESS.get(path, False)))) == []


@pytest.mark.parametrize(
    ("name", "instead"), [("Muon", "HyperMuon"), ("OneBitAdam", "AdamW"), ("Lamb", "AdamW"), ("muon", "HyperMuon")]
)
def test_optimizers_that_need_whole_weights_are_refused(name: str, instead: str) -> None:
    with pytest.raises(UnsupportedError, match=f'"type": "{instead}"'):
        check_config(nested("optimizer.type", name))


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_another_stage_than_3_is_refused(stage: int | None) -> None:
    with pytest.raises(UnsupportedError, match="set it to 3"):
        check_config({"zero_optimization": {"stage": stage}})


def test_values_that_nobody_has_filled_in_are_named() -> None:
    config = nested("optimizer.params.lr", "auto") | {"hyperfsdp": {"supernode_size": "auto"}}
    assert [path for path, _ in refused(config)] == ["optimizer.params.lr"]


def test_all_refusals_are_told_at_once() -> None:
    config = nested("zero_optimization.mics_shard_size", 4)
    config["amp"] = {"enabled": True}
    with pytest.raises(UnsupportedError, match=r"mics_shard_size(.|\n)*amp"):
        check_config(config)


def test_steps_of_validation_are_refused_in_production() -> None:
    with pytest.raises(ConfigurationError, match="validation_steps"):
        read_block({"hyperfsdp": {"validation_steps": 3}})
    block = read_block({"hyperfsdp": {"mode": "validation", "validation_steps": 3}})
    assert block is not None
    assert block.validation_steps == 3
