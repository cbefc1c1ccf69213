"""Models of transformers: planned from their structure, the model's own loss, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import UnsupportedError
from hp_plugin.core.dtensor import ValidationReport, plan_transformer, validate
from tests.support import init_gloo, run_ranks

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def make_model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "llama": {**SIZES, "tie_word_embeddings": True},
        "qwen2": SIZES,
        "qwen3": {**SIZES, "head_dim": 8},
        "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }[family]
    config = transformers.AutoConfig.for_model(family, **options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # at their start, weights are so small that faults would hide
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compare(*, family: str, sequence_parallel: bool) -> ValidationReport:
    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    plan = plan_transformer(make_model(family), {"tp": 2}, sequence_parallel=sequence_parallel, loss_parallel=True)
    return validate(lambda: make_model(family), plan, mesh, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [
        ("llama", True),
        *(
            pytest.param(family, sequence_parallel, marks=pytest.mark.full)
            for family in ("llama", "qwen2", "qwen3", "mixtral", "gpt2")
            for sequence_parallel in (False, True)
            if (family, sequence_parallel) not in (("llama", True), ("gpt2", True))
        ),
    ],
)
def test_model_equals_one_process(family: str, sequence_parallel: bool) -> None:
    report = run_ranks(2, compare, timeout=200.0, family=family, sequence_parallel=sequence_parallel)[0]
    report.raise_if_different()
    print(report)


def test_sequence_parallel_gpt2_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="plan without sequence_parallel"):
        plan_transformer(make_model("gpt2"), {"tp": 2}, sequence_parallel=True)


def test_norms_over_all_heads_are_refused() -> None:
    import transformers

    config = transformers.AutoConfig.for_model("olmo2", **SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=r"self_attn\.q_norm\.weight normalises over all heads together"):
        plan_transformer(model, {"tp": 2})
