"""Which parameters of a Megatron model go to Muon and how its fused weights are cut, on modules named as Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hp_plugin.core.muon.fused import gate_up, mla_kv_down, mla_kv_up, mla_q_up, qkv_interleaved
from hp_plugin.core.muon.splits import PerHead, nested
from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions
from hp_plugin.megatron.muon.groups import identity_of, in_common_order, learning_rates, split_groups
from hp_plugin.megatron.muon.routing import Assignment, Fusion, assign

CONFIG = dict(num_attention_heads=4, num_query_groups=2, kv_channels=8, gated_linear_unit=True)


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(128, 32))


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 32))


def linear(rows: int, cols: int) -> nn.Linear:
    return nn.Linear(cols, rows)


class SelfAttention(nn.Module):
    def __init__(self, config: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.config = config
        for name, layer in layers.items():
            self.add_module(name, layer)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        # Without a gate, of the shape of the embedding: on a stage without output layer that must not make it a head.
        self.linear_fc1, self.linear_fc2 = linear(128, 32), linear(32, 64)


class Mixture(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router, self.experts = TopKRouter(), nn.ModuleList([MLP(config)])


def model(**changes: Any) -> nn.Module:
    config = SimpleNamespace(**{**CONFIG, **changes})
    attention = SelfAttention(config, linear_qkv=linear(64, 32), linear_proj=linear(32, 32))
    layers = {"attention": attention, "mlp": MLP(config), "mixture": Mixture(config), "norm": nn.LayerNorm(32)}
    stage = nn.Module()
    stage.embedding, stage.layers = VocabParallelEmbedding(), nn.ModuleDict(layers)
    return stage


def assigned(module: nn.Module, tp_size: int = 1, **options: Any) -> dict[str, Assignment]:
    found, _ = assign([module], HyperMuonOptions(**options), tp_size=tp_size, group=None)
    return {found[id(parameter)].name: found[id(parameter)] for parameter in module.parameters()}


def test_matrices_go_to_muon_and_all_else_to_adamw_on_a_stage_without_output_layer() -> None:
    found = assigned(model())
    assert {name for name, each in found.items() if each.algorithm == "muon"} == {
        "layers.attention.linear_qkv.weight",
        "layers.attention.linear_proj.weight",
        "layers.mlp.linear_fc1.weight",
        "layers.mlp.linear_fc2.weight",
        "layers.mixture.experts.0.linear_fc1.weight",
        "layers.mixture.experts.0.linear_fc2.weight",
    }
    assert {name for name, each in found.items() if each.is_expert} == {
        f"layers.mixture.experts.0.linear_fc{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")
    }


def test_fused_weights_are_cut_by_what_the_options_say() -> None:
    name, fc1 = "layers.attention.linear_qkv.weight", "layers.mlp.linear_fc1.weight"
    split = qkv_interleaved(2, 2, 8)
    assert assigned(model())[name].fusion == Fusion(split)
    assert assigned(model(), split_qkv=False)[name].fusion == Fusion(None)
    heads = nested(split, q=PerHead(4), k=PerHead(2), v=PerHead(2))
    assert assigned(model(), split_heads=True)[name].fusion == Fusion(heads)
    assert assigned(model(), tp_size=2)[name].fusion == Fusion(split)
    blockwise = assigned(model(), tp_size=2, tensor_parallel="blockwise")
    assert blockwise[name].fusion == Fusion(qkv_interleaved(1, 2, 8))
    gated = assigned(model(attention_output_gate=True))[name].fusion.split
    assert gated == qkv_interleaved(2, 2, 8, gated=True)
    # Tensor parallelism cuts gate and up each by itself, whether or not they are two matrices.
    assert assigned(model())[fc1].fusion == Fusion(gate_up(), pieces=2)
    assert assigned(model(), split_gate_up=False)[fc1].fusion == Fusion(None, pieces=2)
    assert assigned(model(gated_linear_unit=False))[fc1].fusion == Fusion()
    assert assigned(model(moe_mlp_glu_interleave_size=32))[fc1].fusion == Fusion()


def test_latent_attention_is_cut_by_its_dims() -> None:
    config = SimpleNamespace(
        num_attention_heads=4, num_query_groups=4, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    layers = {
        "linear_q_proj": linear(48, 32),
        "linear_kv_down_proj": linear(20, 32),
        "linear_kv_up_proj": linear(64, 16),
    }
    found = assigned(nn.ModuleDict({"a": SelfAttention(config, **layers)}))
    assert found["a.linear_q_proj.weight"].fusion.split == mla_q_up(4, 8, 4)
    assert found["a.linear_kv_up_proj.weight"].fusion.split == mla_kv_up(4, 8, 8)
    assert found["a.linear_kv_down_proj.weight"].fusion.split == mla_kv_down(16, 4)


def test_blockwise_refuses_query_groups_that_do_not_divide() -> None:
    with pytest.raises(ConfigurationError, match="cannot cut the model's 2 query groups over 4 ranks"):
        assigned(model(), tp_size=4, tensor_parallel="blockwise")


def test_patterns_decide_and_one_that_matches_nothing_is_refused() -> None:
    found = assigned(model(), include="embedding.*", exclude="*.linear_proj.weight, *.mlp.linear_fc2.weight")
    assert found["embedding.weight"].algorithm == "muon"
    assert found["layers.attention.linear_proj.weight"].algorithm == "adamw"
    assert found["layers.mlp.linear_fc2.weight"].algorithm == "adamw"
    with pytest.raises(ConfigurationError, match="the pattern 'decoder.x' of --hypermuon-include"):
        assigned(model(), include="decoder.x")


def test_a_job_without_any_matrix_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no parameter of the model goes to Muon"):
        assigned(nn.ModuleDict({"embedding": VocabParallelEmbedding()}))


@pytest.mark.parametrize(
    ("algorithm", "options", "expected"),
    [
        ("muon", {}, (1e-3, 1e-4)),
        ("muon", {"lr": 0.02}, (0.02, 0.002)),
        ("muon", {"lr": 0.02, "min_lr": 0.001}, (0.02, 0.001)),
        ("muon", {"adam_lr": 0.5}, (1e-3, 1e-4)),
        ("adamw", {"adam_lr": 2e-3}, (2e-3, 2e-4)),
        ("adamw", {"lr": 0.5, "adam_min_lr": 0.0}, (1e-3, 0.0)),
    ],
)
def test_the_schedule_keeps_its_shape(algorithm: Any, options: dict[str, float], expected: tuple[float, float]) -> None:
    group = {"max_lr": 1e-3, "min_lr": 1e-4}
    found = learning_rates(group, algorithm, HyperMuonOptions(**options), lr=1e-3, min_lr=1e-4)
    assert found == pytest.approx(expected)


def test_a_group_with_a_learning_rate_of_its_own_keeps_it() -> None:
    group = {"max_lr": 5e-3, "min_lr": 5e-4}
    found = learning_rates(group, "adamw", HyperMuonOptions(adam_lr=1.0), lr=1e-3, min_lr=1e-4)
    assert found == (5e-3, 5e-4)


def test_groups_are_divided_by_who_trains_their_parameters() -> None:
    matrix, vector, bias = (nn.Parameter(torch.empty(1)) for _ in range(3))
    algorithms: dict[int, Any] = {id(matrix): "muon", id(vector): "adamw", id(bias): "adamw"}
    who = {key: Assignment("", algorithm, Fusion(), False) for key, algorithm in algorithms.items()}
    groups = [{"params": [matrix, vector], "wd_mult": 1.0}, {"params": [bias], "wd_mult": 0.0}]
    found = [(algorithm, group["wd_mult"], group["params"]) for algorithm, group in split_groups(groups, who)]
    assert [each[:2] for each in found] == [("muon", 1.0), ("adamw", 1.0), ("adamw", 0.0)]
    assert [[id(p) for p in each[2]] for each in found] == [[id(matrix)], [id(vector)], [id(bias)]]


def test_ranks_whose_groups_are_in_another_order_agree_on_one() -> None:
    first: Any = [("muon", {"params": [1], "wd_mult": 1.0}), ("adamw", {"params": [], "wd_mult": 0.0})]
    second: Any = [("adamw", {"params": [2], "wd_mult": 0.0}), ("muon", {"params": [], "wd_mult": 1.0})]
    everyone = [[(identity_of(a, g), bool(g["params"])) for a, g in rank] for rank in (first, second)]
    assert in_common_order(first, everyone) == first
    assert in_common_order(second, everyone) == second[::-1]
    assert in_common_order(second, everyone[:1]) == second[1:]  # the other has no parameters anywhere
