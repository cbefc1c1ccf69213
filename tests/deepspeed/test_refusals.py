"""What HyperFSDP does not support is refused at `deepspeed.initialize`, and a bad step is skipped by all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed import helpers
from tests.deepspeed.training import base_config
from tests.support import run_ranks


def with_zero(**options: Any) -> dict[str, Any]:
    config = base_config()
    config["zero_optimization"].update(options)
    return config


def with_block(**block: Any) -> dict[str, Any]:
    return base_config(hyperfsdp=block)


def with_optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return base_config(optimizer={"type": kind, "params": {"lr": 1e-3, **params}})


CONFIGS = {
    "offload": with_zero(offload_optimizer={"device": "cpu"}),
    "hpz": with_zero(zero_hpz_partition_size=2),
    "misspelt": with_block(supernode_sise=2),
    "uneven": with_block(supernode_size=3),
    "unit": with_block(units=["Blok"]),
    "muon": with_optimizer("Muon"),
    "lion": with_optimizer("Lion"),
    "option": with_optimizer("AdamW", beta=(0.9, 0.99)),
    "norm": with_optimizer("AdamW", max_grad_norm=1.0),
}
EXPECTED = {
    "offload": '"zero_optimization.offload_optimizer"',
    "hpz": "shard_size",
    "misspelt": "did you mean supernode_size",
    "uneven": "does not divide the 2 ranks",
    "unit": "did you mean Block",
    "muon": "HyperMuon",
    "lion": "'lion' is not supported",
    "option": "did you mean betas",
    "norm": "gradient_clipping",
    "pipeline": "PipelineModule",
    "compile": "torch.compile on functions",
    "offload_states": "offload_states",
    "dead": "not parameters of the model",
}


@pytest.mark.full
@pytest.mark.timeout(400)
def test_initialize_refuses_by_name() -> None:
    for found in run_ranks(
        2, helpers.what_initialize_says, flavour="deepspeed", timeout=200, configs=CONFIGS, model="pipeline"
    ):
        assert found.keys() == EXPECTED.keys()
        for name, expected in EXPECTED.items():
            assert expected in found[name], f"{name}: {found[name]}"
            assert found[name].split(":")[0] in ("ConfigurationError", "UnsupportedError")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_step_with_gradients_that_are_not_finite_is_skipped_by_all() -> None:
    for facts in run_ranks(2, helpers.step_with_infinite_gradients, flavour="deepspeed", timeout=200):
        assert facts == {
            "unchanged": True,
            "skipped": 1,
            "applied": False,
            "overflow": True,
            "steps": 1,
            "applied later": True,
        }
