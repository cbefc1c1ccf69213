"""What a parameter is, module type by module type. Stand-ins have the class names and attributes of host frameworks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_plugin.core.muon.roles import adamw_reason, members
from hp_plugin.errors import ConfigurationError


def reasons(model: nn.Module) -> dict[str, str | None]:
    return {member.name: adamw_reason(member) for member in members(model)}


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or (4, 6)))


class Holder(nn.Module):
    """A module with the given children and parameters."""

    def __init__(self, **entries: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, entry in entries.items():
            setattr(self, name, entry)


def named(class_name: str, **entries: nn.Module | nn.Parameter) -> nn.Module:
    """A module of a class that is called so."""
    return type(class_name, (Holder,), {})(**(entries or {"weight": matrix()}))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(6, 4), {"m.weight": None, "m.bias": "bias"}),
        (nn.Embedding(8, 4), {"m.weight": "embedding"}),
        (nn.EmbeddingBag(8, 4), {"m.weight": "embedding"}),
        (nn.LayerNorm((4, 6)), {"m.weight": "norm", "m.bias": "norm"}),
        (nn.RMSNorm(6), {"m.weight": "norm"}),
        (nn.GroupNorm(2, 4), {"m.weight": "norm", "m.bias": "norm"}),
        (nn.BatchNorm2d(4), {"m.weight": "norm", "m.bias": "norm"}),
        (nn.Conv2d(4, 8, 3), {"m.weight": None, "m.bias": "bias"}),
        (nn.Conv1d(4, 8, 3, bias=False), {"m.weight": None}),
        (nn.Conv1d(8, 8, 3, groups=8, bias=False), {"m.weight": "grouped convolution"}),
        (nn.ConvTranspose2d(4, 8, 3, bias=False), {"m.weight": "transposed convolution"}),
        (nn.Linear(6, 1, bias=False), {"m.weight": "one row or column"}),
        (nn.Linear(1, 6, bias=False), {"m.weight": "one row or column"}),
        (named("VocabParallelEmbedding"), {"m.weight": "embedding"}),
        (named("FusedLayerNorm"), {"m.weight": "norm"}),
        (named("TopKRouter"), {"m.weight": "router"}),
        (named("MixtralTopKRouter"), {"m.weight": "router"}),
        (named("MoEGate"), {"m.weight": "router"}),
        (named("ColumnParallelLinear"), {"m.weight": None}),
        (
            named("TELayerNormColumnParallelLinear", weight=matrix(), layer_norm_weight=matrix(6)),
            {"m.weight": None, "m.layer_norm_weight": "vector"},
        ),
        (named("Qwen3MoeExperts", down_proj=matrix(2, 4, 6)), {"m.down_proj": None}),
        (named("GptOssExperts", gate_up_proj_bias=matrix(2, 6)), {"m.gate_up_proj_bias": "bias"}),
        (named("Experts", scale=matrix(2, 1, 6)), {"m.scale": "one row or column"}),
        (named("VisionTransformer", pos_embed=matrix(1, 5, 6)), {"m.pos_embed": "embedding by name"}),
        (named("VisionTransformer", cls_token=matrix(1, 1, 6)), {"m.cls_token": "embedding by name"}),
        (named("MambaMixer", A_log=matrix(), D=matrix(4)), {"m.A_log": "state-space decay", "m.D": "vector"}),
        (named("Scale", gain=nn.Parameter(torch.zeros(()))), {"m.gain": "scalar"}),
        (named("Empty", weight=matrix(0, 4)), {"m.weight": "empty"}),
    ],
)
def test_module_types(module: nn.Module, expected: dict[str, str | None]) -> None:
    assert reasons(Holder(m=module)) == expected


@pytest.mark.parametrize("name", ["lm_head", "output_layer", "embed_out", "head", "score", "classifier"])
def test_output_heads_by_name(name: str) -> None:
    """deepspeedai/DeepSpeed#7641: the head is no hidden layer."""
    assert reasons(Holder(**{name: nn.Linear(6, 4, bias=False)})) == {f"{name}.weight": "output head by name"}


def test_heads_of_attention_are_not_output_heads() -> None:
    assert reasons(Holder(heads=nn.ModuleList([nn.Linear(6, 4, bias=False)]))) == {"heads.0.weight": None}


def test_a_gate_routes_where_there_are_experts_only() -> None:
    """A gated MLP may call a projection "gate"."""
    gate = nn.Linear(6, 4, bias=False)
    assert reasons(Holder(gate=gate, up=nn.Linear(6, 4, bias=False)))["gate.weight"] is None
    assert reasons(Holder(gate=gate, experts=nn.ModuleList()))["gate.weight"] == "router"
    assert reasons(Holder(mlp=named("DeepseekMoE", gate=gate)))["mlp.gate.weight"] == "router"
    assert reasons(Holder(router=gate))["router.weight"] == "router"


def test_a_tied_parameter_is_what_any_of_its_owners_makes_it() -> None:
    """Also where the head comes first: identity decides, not the order (NVIDIA/Megatron-LM#4641 is of this kind)."""
    head, table = nn.Linear(4, 8, bias=False), nn.Embedding(8, 4)
    head.weight = table.weight
    model = Holder(project=head, table=table)
    assert reasons(model) == {"project.weight": "embedding"}
    assert [place.name for place in members(model)[0].places] == ["project.weight", "table.weight"]


def test_the_embedding_of_a_later_pipeline_stage_is_an_embedding() -> None:
    """NVIDIA/Megatron-LM#4641: the tied copy on the last stage lacked the mark and went to Muon; its type tells."""
    stage = Holder(
        embedding=Holder(word_embeddings=named("VocabParallelEmbedding")), decoder=nn.Linear(6, 4, bias=False)
    )
    assert reasons(stage) == {"embedding.word_embeddings.weight": "embedding", "decoder.weight": None}


@pytest.mark.parametrize(
    ("mark", "value", "reason"),
    [
        ("is_embedding_or_output_parameter", True, "marked is_embedding_or_output_parameter"),
        ("shared_embedding", True, "marked shared_embedding"),
        ("use_muon", False, "marked use_muon=False"),
        ("use_muon", True, None),
    ],
)
def test_marks_of_host_frameworks_count(mark: str, value: bool, reason: str | None) -> None:
    linear = nn.Linear(6, 4, bias=False)
    setattr(linear.weight, mark, value)
    assert reasons(Holder(m=linear)) == {"m.weight": reason}


def test_a_replaced_class_is_still_what_it_was() -> None:
    """`fully_shard` replaces a module's class by a subclass of it."""
    modules = {"a": nn.Embedding(8, 4), "b": named("TopKRouter"), "c": nn.LayerNorm(4)}
    mixin = type("FSDPModule", (), {})
    for module in modules.values():
        module.__class__ = type("Sharded", (mixin, type(module)), {})
    assert list(reasons(Holder(**modules)).values()) == ["embedding", "router", "norm", "norm"]


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"])
def test_wrappers_are_looked_through(wrapper: str) -> None:
    inner = Holder(gate=Holder(**{wrapper: nn.Linear(6, 4, bias=False)}), experts=nn.ModuleList())
    head = Holder(**{wrapper: nn.Linear(6, 4, bias=False)})
    assert list(reasons(Holder(mlp=Holder(**{wrapper: inner}), lm_head=head)).values()) == [
        "router",
        "output head by name",
    ]


def test_two_names_within_one_module_are_one_member() -> None:
    model = Holder(first=matrix())
    model.second = model.first
    assert [[place.name for place in member.places] for member in members(model)] == [["first", "second"]]


def test_the_shape_of_a_partitioned_parameter_is_that_of_the_whole() -> None:
    """DeepSpeed ZeRO-3 leaves a parameter with no elements and says its shape in `ds_shape`."""
    linear = nn.Linear(6, 4, bias=False)
    linear.weight = nn.Parameter(torch.empty(0))
    linear.weight.ds_shape = torch.Size((4, 6))  # type: ignore[attr-defined]
    (member,) = members(linear)
    assert member.shape == (4, 6)
    assert adamw_reason(member) is None


@pytest.mark.parametrize("flat", [True, False])
def test_flattened_shards_are_refused_by_name(flat: bool) -> None:
    """KellerJordan/Muon#45, verl-project/verl-SpeCo#91: FSDP1 flattens weights, and all of them would go to AdamW."""
    model = Holder(m=nn.Linear(6, 4, bias=False))
    weight = nn.Parameter(torch.zeros(24))
    if flat:
        model.m = Holder(_flat_param=weight)
        weight._is_flat_param = True  # type: ignore[attr-defined]
    else:
        model.m.weight = weight
    with pytest.raises(ConfigurationError, match=r"parameter m\.\w+ has the shape \(24,\): it is a flattened shard"):
        members(model)


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"parameter m.weight has no shape yet"):
        members(Holder(m=nn.LazyLinear(4)))
