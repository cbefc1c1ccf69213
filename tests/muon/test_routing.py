"""The decision for whole models: what goes where, patterns, splits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plugin.core.muon.fused import gate_up, qkv
from hp_plugin.core.muon.optimizer import HyperMuon
from hp_plugin.core.muon.routing import Routing, route
from hp_plugin.core.muon.splits import Convolution, GroupedRows, RowSplit, Stack, Transposed, Whole
from hp_plugin.errors import ConfigurationError, UnsupportedError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)


class Experts(nn.Module):
    def __init__(self, width: int, *, flat: bool = False) -> None:
        super().__init__()
        shape = (4 * 2 * width, width) if flat else (4, 2 * width, width)
        self.gate_up_proj = nn.Parameter(torch.zeros(shape))


class Mixture(nn.Module):
    def __init__(self, width: int, *, flat: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = Experts(width, flat=flat)


class Transformer(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, *, vocab: int = 32, width: int = 8, tied: bool = False, head: str = "lm_head") -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.RMSNorm(width)
        linear = nn.Linear(width, vocab, bias=False)
        if tied:
            linear.weight = self.embed.weight
        self.add_module(head, linear)


def muon_names(routing: Routing) -> list[str]:
    return [row.name for row in routing.rows if row.algorithm == "muon"]


def row(routing: Routing, name: str) -> Any:
    return next(row for row in routing.rows if row.name == name)


HIDDEN = [f"blocks.{layer}.{name}.weight" for layer in range(2) for name in ("qkv", "proj")]


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw(tied: bool) -> None:
    model = Transformer(tied=tied)
    routing = route(model)
    assert muon_names(routing) == HIDDEN
    assert [r.name for r in routing.rows] == [name for name, _ in model.named_parameters()]
    assert row(routing, "embed.weight").reason == ("embedding, tied" if tied else "embedding")
    assert row(routing, "embed.weight").aliases == (("lm_head.weight",) if tied else ())


def test_every_parameter_is_in_one_group_even_if_it_is_tied() -> None:
    model = Transformer(tied=True)
    groups = route(model).param_groups(muon={"lr": 0.0}, adamw={"weight_decay": 0.0})
    params = [param for group in groups for param in group["params"]]
    assert {id(param) for param in params} == {id(param) for param in model.parameters()}
    assert len(params) == len(list(model.parameters()))
    assert [group["algorithm"] for group in groups] == ["muon", "adamw"]
    # verl-project/verl-SpeCo#91: "value or default" dropped zeros.
    assert groups[0]["lr"] == 0.0 and groups[1]["weight_decay"] == 0.0
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))


def test_torch_takes_the_groups_with_their_names() -> None:
    groups = route(Transformer()).param_groups()
    saved = torch.optim.SGD(groups, lr=0.1).state_dict()["param_groups"]
    assert saved[0]["param_names"] == HIDDEN
    assert saved[0]["algorithm"] == "muon"


def test_frozen_parameters_are_listed_and_in_no_group() -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    routing = route(model)
    assert muon_names(routing) == HIDDEN[2:]
    assert routing.frozen == tuple(f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters())
    params = [id(param) for group in routing.param_groups() for param in group["params"]]
    assert sorted(params) == sorted(id(param) for param in model.parameters() if param.requires_grad)


# ---------------------------------------------------------------------------------------------------------- the head


def test_an_untied_head_without_a_known_name_is_found_by_its_shape() -> None:
    routing = route(Transformer(head="to_words"))
    assert row(routing, "to_words.weight").reason == "output head by shape"
    assert muon_names(routing) == HIDDEN


def test_a_head_that_cannot_be_told_is_refused_until_it_is_named() -> None:
    model = Transformer(vocab=8, width=8, head="to_words")
    with pytest.raises(ConfigurationError, match=r"blocks.0.proj.weight, .*to_words.weight. Name the head"):
        route(model)
    assert row(route(model, adamw="to_words.*"), "to_words.weight").algorithm == "adamw"
    assert muon_names(route(model, adamw=["to_words.*"])) == HIDDEN
    assert "to_words.weight" in muon_names(route(model, muon=["*.proj.*", "to_words.*"]))


@pytest.mark.parametrize("tied", [False, True])
def test_shapes_are_not_asked_where_the_head_is_known(tied: bool) -> None:
    """A vocabulary as large as the width makes hidden layers look like the head."""
    assert muon_names(route(Transformer(vocab=8, width=8, tied=tied, head="to_words" if tied else "lm_head"))) == HIDDEN


def test_a_head_that_borrows_the_embedding_has_no_weight_to_be_found() -> None:
    """Megatron's output_layer has no weight of its own if it shares the embedding's."""
    model = Transformer(vocab=8, width=8, head="output_layer")
    model.output_layer.register_parameter("weight", None)
    assert muon_names(route(model)) == HIDDEN


# ---------------------------------------------------------------------------------------------------------- patterns


def test_patterns_come_first() -> None:
    routing = route(Transformer(), muon=["lm_head.weight"], adamw="blocks.*.proj.*")
    assert muon_names(routing) == [HIDDEN[0], HIDDEN[2], "lm_head.weight"]
    assert row(routing, "lm_head.weight").reason == "pattern lm_head.weight"
    assert row(routing, HIDDEN[1]).reason == "pattern blocks.*.proj.*"


def test_patterns_match_any_name_of_a_tied_parameter() -> None:
    assert "embed.weight" in muon_names(route(Transformer(tied=True), muon="lm_head.*"))


@pytest.mark.parametrize("which", ["muon", "adamw"])
def test_a_pattern_that_matches_nothing_is_refused(which: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"pattern 'layers.\*' of {which} matches no parameter"):
        route(Transformer(), **{which: "layers.*"})


def test_a_pattern_that_matches_frozen_parameters_only_is_refused() -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    with pytest.raises(ConfigurationError, match="matches frozen parameters only"):
        route(model, muon="blocks.0.*")


def test_patterns_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks.0.proj.weight is given to Muon by .* and to AdamW by"):
        route(Transformer(), muon="*.proj.weight", adamw="blocks.0.proj.*")


def test_a_vector_cannot_be_forced_to_muon() -> None:
    with pytest.raises(ConfigurationError, match=r"gives blocks.0.qkv.bias to Muon, but its shape is \(24,\)"):
        route(Transformer(), muon="*.qkv.*")


def test_a_matrix_of_one_row_cannot_be_forced_to_muon() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "thin": nn.Linear(4, 1, bias=False)})
    with pytest.raises(ConfigurationError, match="one row or column"):
        route(model, muon="thin.*")


# ---------------------------------------------------------------------------------------------------------- splits


def test_splits_go_to_the_muon_parameters_that_they_match() -> None:
    model = Transformer()
    split = qkv(2, 2, 4)
    routing = route(model, splits={"*.qkv.*": split})  # matches biases too
    assert routing.splits == {block.qkv.weight: split for block in model.blocks}
    assert row(routing, "blocks.0.qkv.bias").split is None
    assert route(model).maybe_fused == (HIDDEN[0], HIDDEN[2])
    assert routing.maybe_fused == ()


def test_a_split_that_does_not_fit_names_every_parameter() -> None:
    """NVIDIA/Megatron-LM#4731: found before the first step, by name."""
    with pytest.raises(ConfigurationError) as error:
        route(Transformer(), splits={"*.qkv.*": qkv(2, 1, 4)})
    assert "blocks.0.qkv.weight" in str(error.value) and "blocks.1.qkv.weight" in str(error.value)
    assert "16 rows, but the matrix has 24" in str(error.value)


def test_splits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="say different things"):
        route(Transformer(), splits={"*.qkv.*": qkv(2, 2, 4), "blocks.0.qkv.weight": Whole()})


def test_a_split_that_cuts_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="matches parameters of AdamW only"):
        route(Transformer(), splits={"lm_head.*": RowSplit(("a", "b"))})
    with pytest.raises(ConfigurationError, match="of splits matches no parameter"):
        route(Transformer(), splits={"*.attention.*": Whole()})


def test_experts_are_stacks() -> None:
    model = nn.ModuleDict({"mlp": Mixture(8)})
    routing = route(model)
    assert row(routing, "mlp.experts.gate_up_proj").split == Stack()
    assert row(routing, "mlp.gate.weight").reason == "router"
    assert routing.maybe_fused == ("mlp.experts.gate_up_proj",)
    assert row(route(model, splits={"*gate_up*": Stack(gate_up())}), "mlp.experts.gate_up_proj").split == Stack(
        gate_up()
    )


def test_experts_in_two_dims_need_a_split() -> None:
    model = nn.ModuleDict({"mlp": Mixture(8, flat=True)})
    with pytest.raises(ConfigurationError, match="belongs to a module of class Experts, so it holds several experts"):
        route(model)
    assert row(route(model, splits={"*gate_up*": GroupedRows(4)}), "mlp.experts.gate_up_proj").split == GroupedRows(4)
    assert row(route(model, splits={"*gate_up*": Whole()}), "mlp.experts.gate_up_proj").split == Whole()


def test_one_matrix_per_expert_is_a_matrix() -> None:
    experts = nn.ModuleList([nn.Linear(4, 8, bias=False) for _ in range(2)])
    routing = route(nn.ModuleDict({"experts": experts}))
    assert [r.split for r in routing.rows] == [None, None]
    assert [r.reason for r in routing.rows] == ["experts", "experts"]


def test_three_dims_that_nothing_explains_are_refused_with_all_names() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4)})
    model.first = nn.Parameter(torch.zeros(2, 4, 4))
    model.second = nn.Parameter(torch.zeros(2, 4, 4))
    with pytest.raises(UnsupportedError, match=r"parameter first of shape (.|\n)*parameter second of shape"):
        route(model)
    assert row(route(model, splits={"first": Stack(), "second": Stack()}), "second").algorithm == "muon"
    assert row(route(model, adamw=["first", "second"]), "first").algorithm == "adamw"


def test_convolutions_go_where_the_option_says() -> None:
    """pytorch/pytorch#166209: torch's Muon refuses convolutions."""
    model = nn.ModuleDict(
        {
            "one": nn.Conv1d(4, 8, 3),
            "two": nn.Conv2d(4, 8, 3),
            "grouped": nn.Conv1d(8, 8, 3, groups=2),
            "l": nn.Linear(4, 4),
        }
    )
    routing = route(model)
    assert muon_names(routing) == ["one.weight", "two.weight", "l.weight"]
    assert row(routing, "one.weight").split == Convolution()
    assert muon_names(route(model, convolutions="adamw")) == ["l.weight"]
    assert row(route(model, muon="grouped.weight"), "grouped.weight").split == Convolution(2)
    assert row(route(model, splits={"grouped.weight": Convolution()}), "grouped.weight").split == Convolution()
    assert "two.weight" in muon_names(route(model, convolutions="adamw", muon="two.weight"))


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_model_without_hidden_matrices_is_refused() -> None:
    """hiyouga/LlamaFactory#8041, verl-project/verl-SpeCo#91: a "Muon" that trains nothing, with the curve of AdamW."""
    with pytest.raises(ConfigurationError, match="no parameter goes to Muon") as error:
        route(nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.LayerNorm(4)}))
    assert "embedding" in str(error.value) and "norm.bias" in str(error.value)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(4, 4).requires_grad_(False)])
def test_a_model_without_trained_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="no parameter goes to Muon"):
        route(model)


def test_the_table_gathers_layers_and_counts() -> None:
    model = Transformer()
    model.norm.requires_grad_(False)
    table = route(model, splits={"*.qkv.*": qkv(2, 2, 4)}).table()
    (line,) = [line for line in table.splitlines() if "qkv.weight" in line]
    assert line.split() == ["blocks.*.qkv.weight", "2", "24x8", "muon", "hidden", "matrix", "rows", "q:8", "k:8", "v:8"]
    assert table.splitlines()[-1] == "4 parameters to Muon, 8 to AdamW, 1 frozen"
    full = route(model).table(full=True)
    assert "blocks.1.qkv.weight" in full
    assert full.splitlines()[-1] == "without a split, though they may be fused: blocks.*.qkv.weight"


def test_a_sharded_model_is_routed_as_the_whole_one() -> None:
    """Shapes are global, ties survive, and the classes that `fully_shard` makes are recognised."""
    expected = route(Transformer(tied=True)).rows
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = Transformer(tied=True)
        mesh = init_device_mesh("cpu", (4,))
        for module in [*model.blocks, model.norm, model]:
            fully_shard(module, mesh=mesh)
        assert route(model).rows == expected
    finally:
        dist.destroy_process_group()


class Conv1D(nn.Module):
    """As Hugging Face stores the linear layers of GPT-2: (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


def test_linear_layers_of_gpt2_are_scaled_as_what_they_are() -> None:
    routing = route(nn.Sequential(Conv1D(12, 4), nn.Linear(4, 12)))
    splits = {row.name: row.split for row in routing.rows if row.algorithm == "muon"}
    assert splits == {"0.weight": Transposed(), "1.weight": None}
    # One step with a gradient of ones moves both weights by as much, one being the other transposed.
    model = nn.Sequential(Conv1D(12, 4), nn.Linear(4, 12, bias=False))
    optimizer = HyperMuon(route(model), lr=1.0, weight_decay=0.0, ns_dtype=torch.float32)
    with torch.no_grad():
        model[1].weight.zero_()
    model[0].weight.grad, model[1].weight.grad = torch.ones(4, 12), torch.ones(12, 4)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.T, model[1].weight)
