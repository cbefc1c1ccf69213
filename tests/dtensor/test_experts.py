"""Experts that an axis divides, tokens sent to them by all-to-all: equal to one process, in every gradient."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import ConfigurationError, UnsupportedError, apply_plan, fully_shard
from hp_plugin.core.dtensor import ShardingPlan, ValidationReport, check_plan, plan_transformer, validate
from tests.dtensor.models import Decoder, Mixture, Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPE = Shape(experts=4, tied=True, key_heads=2)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ExpertModules(nn.ModuleList):
    """Experts as modules."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, *, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self):
            tokens, slots = torch.where(chosen == index)
            if len(tokens):  # an expert that gets no token has no gradient
                out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slots].unsqueeze(-1))
        return out


class ModuleMixture(Mixture):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.experts = ExpertModules(Expert(shape.width) for _ in range(shape.experts))  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return self.experts(tokens, chosen, weights=weights).view_as(x)


def make_model(kind: str) -> nn.Module:
    """All tokens go to the first two experts of four under "starved": a rank of two gets nothing."""
    if kind in ("mixtral", "qwen3_moe", "qwen2_moe"):
        return make_transformer(kind)
    model = make_decoder(SHAPE)
    if kind == "modules":
        for layer in model.layers:
            layer.mlp = ModuleMixture(SHAPE)  # type: ignore[assignment]
    if kind == "starved":
        with torch.no_grad():
            for layer in model.layers:
                assert isinstance(layer.mlp, Mixture)
                layer.norm2.bias.fill_(1.0)  # type: ignore[union-attr]
                layer.mlp.router.weight[2:] = -1.0
    return model


def make_transformer(family: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = dict.fromkeys(("vocab_size", "intermediate_size"), 64)
    sizes |= dict.fromkeys(("hidden_size", "max_position_embeddings"), 32)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok"), 2)
    sizes |= {"num_attention_heads": 4, "use_cache": False, "output_router_logits": False}
    sizes |= {"num_local_experts": 4} if family == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 32}
    if family == "qwen3_moe":
        sizes["head_dim"] = 8
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 32
    # Norms and routers of transformers compute in fp32 whatever their input is, so that rounding would be that of fp32.
    torch.float = torch.float32 = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def shard_over_the_rest(model: nn.Module, mesh: Any) -> nn.Module:
    """Experts over `dp_shard`; everything else over `dp_shard` and `ep` together, over which the batch is divided."""
    dense = mesh["dp_shard", "ep"]._flatten("dp")
    for layer in model.layers if isinstance(model, Decoder) else model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer.mlp.experts, mesh=mesh["dp_shard"])
        fully_shard(layer, mesh=dense)
    return fully_shard(model, mesh=dense)


def compare(*, kind: str, sizes: tuple[int, int, int], fsdp: bool) -> ValidationReport:
    init_gloo()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "ep", "tp"))
    axes = {"ep": sizes[1], "tp": sizes[2]}
    plan = plan_transformer(make_model(kind), axes, sequence_parallel=True, loss_parallel=True, expert_axis="ep")
    plan = ShardingPlan.from_yaml(plan.to_yaml())
    wrap = (lambda model: shard_over_the_rest(model, mesh)) if fsdp else None
    ids, targets = make_batch(SHAPE)
    batch: Any = (ids, targets) if hasattr(make_model(kind), "tokens") else {"input_ids": ids, "labels": ids}
    return validate(lambda: make_model(kind), plan, mesh, batch, data_parallel=wrap, dtype=torch.float64)


def check(kind: str, sizes: tuple[int, int, int], *, fsdp: bool) -> None:
    ranks = sizes[0] * sizes[1] * sizes[2]
    report = run_ranks(ranks, compare, timeout=200.0, kind=kind, sizes=sizes, fsdp=fsdp)[0]
    report.raise_if_different()
    print(report)
    assert report.largest_error("gradient") < 1e-10


@pytest.mark.parametrize("kind", ["modules", pytest.param("stacked", marks=pytest.mark.full)])
def test_experts_divided_over_two_ranks_equal_one(kind: str) -> None:
    check(kind, (1, 2, 1), fsdp=False)


def test_experts_under_fully_shard_over_the_rest_equal_one() -> None:
    check("stacked", (2, 2, 1), fsdp=True)


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [False, True], ids=["averaged", "fully_shard"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1)], ids=lambda s: "x".join(map(str, s))
)
@pytest.mark.parametrize("kind", ["stacked", "modules", "starved"])
def test_every_mesh_equals_one_process(kind: str, sizes: tuple[int, int, int], fsdp: bool) -> None:
    check(kind, sizes, fsdp=fsdp)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 2, 2)], ids=["ep2", "ep2_tp2"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_models_of_transformers_equal_one_process(kind: str, sizes: tuple[int, int, int]) -> None:
    pytest.importorskip("transformers")
    check(kind, sizes, fsdp=False)


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        ({"ep": 3, "tp": 1}, {}, "experts holds 4 experts, which axis ep with 3 ranks does not divide"),
        ({"ep": 2, "tp": 1}, {"batch": ["cp"]}, "divides the batch over axis 'cp'"),
    ],
)
def test_plans_of_experts_that_cannot_be_are_refused(
    axes: dict[str, int], change: dict[str, Any], message: str
) -> None:
    model = make_decoder(SHAPE)
    plan = plan_transformer(model, {"ep": 2, "tp": 1}, expert_axis="ep")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_plan(model, ShardingPlan.from_dict({**plan.to_dict(), "axes": axes, **change}))


class LoopMixture(ModuleMixture):
    """Calls its experts itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.experts = nn.ModuleList(self.experts)  # type: ignore[assignment]


def test_a_block_that_calls_its_experts_one_by_one_is_refused() -> None:
    model = make_decoder(SHAPE)
    model.layers[0].mlp = LoopMixture(SHAPE)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="a list of experts that its parent calls one by one"):
        plan_transformer(model, {"ep": 2, "tp": 1}, expert_axis="ep")


def other_calls() -> None:
    init_gloo()
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_shard", "ep", "tp"))
    model = make_decoder(SHAPE)
    apply_plan(model, plan_transformer(model, {"ep": 2, "tp": 1}, expert_axis="ep"), mesh)
    experts = model.layers[0].mlp.experts  # type: ignore[union-attr]
    assert experts.down_proj.shape[0] == 2
    tokens, chosen = torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="called with 1 floating and 1 integer tensors"):
        experts(tokens, chosen)
    with pytest.raises(UnsupportedError, match=r"their shapes are \(3, 32\), \(3, 2\) and \(3, 4\)"):
        experts(tokens, chosen, torch.rand(3, 4))


def test_calls_that_cannot_be_dispatched_are_refused() -> None:
    run_ranks(2, other_calls)
