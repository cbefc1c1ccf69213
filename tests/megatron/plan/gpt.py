"""Rank functions: a GPT of Megatron, whole and divided, and the plan read from the divided one."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_plugin.core.dtensor import ParameterSpec, ShardingPlan
from hp_plugin.core.layout import AttachedLayout, Layout
from tests.megatron import wrapped

VOCABULARY, LENGTH, BATCH = 32, 8, 4


def make_gpt(name: str, **options: Any) -> Any:
    """Four heads of two query groups; `name`: "dense", "gelu" with biases and untied, or "experts"."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(7)
    swiglu: dict[str, Any] = {"gated_linear_unit": True, "activation_func": F.silu}
    routed: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    routed |= {"moe_shared_expert_intermediate_size": 16, "moe_token_dispatcher_type": "alltoall"}
    chosen: dict[str, Any] = {
        "dense": {**swiglu, "normalization": "RMSNorm", "qk_layernorm": True},
        "gelu": {"add_bias_linear": True},
        "experts": {**swiglu, **routed},
    }[name]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **{"add_bias_linear": False, **chosen, **options},
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=name != "gelu",
    )


def loss(model: Any, rows: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    result: torch.Tensor = model(tokens[rows], positions[rows], None, labels=labels[rows]).mean()
    return result


def read_plan(*, name: str, tp: int, ep: int = 1, sequence_parallel: bool = False) -> ShardingPlan:
    from hp_plugin.megatron.plan import plan_from_megatron

    wrapped.start(tensor_parallel=tp, expert_parallel=ep, expert_tensor_parallel=tp)
    return plan_from_megatron(divided_gpt(name, tp, ep, sequence_parallel))


def planner_plan(*, name: str, tp: int, ep: int = 1) -> ShardingPlan:
    """What the planner plans for the undivided model, from its structure alone."""
    from hp_plugin.core.dtensor import plan_transformer

    wrapped.start()
    axes = {"ep": ep, "tp": tp} if name == "experts" else {"tp": tp}
    expert_axis = "ep" if name == "experts" else None
    return plan_transformer(make_gpt(name), axes, sequence_parallel=True, loss_parallel=True, expert_axis=expert_axis)


def divided_gpt(name: str, tp: int, ep: int, sequence_parallel: bool) -> Any:
    sizes: dict[str, Any] = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    if name == "experts":
        sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp}
    return make_gpt(name, **sizes)


def check_by_value(*, name: str, tp: int, ep: int, sequence_parallel: bool, wrong: bool = False) -> list[str]:
    """Cuts a whole model's weights as the plan says, and compares loss and every gradient. Returns what differs."""
    from megatron.core import parallel_state

    from hp_plugin.megatron.plan import plan_from_megatron

    wrapped.start()
    whole = make_gpt(name)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected_loss = loss(whole, slice(None))
    expected_loss.backward()
    expected = {n: (p.detach().clone(), p.grad.clone()) for n, p in whole.named_parameters()}
    parallel_state.destroy_model_parallel()
    wrapped.start(tensor_parallel=tp, expert_parallel=ep, expert_tensor_parallel=tp, again=True)
    model = divided_gpt(name, tp, ep, sequence_parallel)
    plan = ShardingPlan.from_yaml(plan_from_megatron(model).to_yaml())
    placed = plan.placed_parameters()
    assert placed.keys() == expected.keys(), placed.keys() ^ expected.keys()
    if wrong:  # the gate and up projections as if they were one block
        placed = {n: ParameterSpec(held=_unblocked(e.held), used=e.used) for n, e in placed.items()}
    tp_group, tp_rank = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    dp_group, dp_rank = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    pieces = {}
    for local, parameter in model.named_parameters():
        full = _whole_name(local, ep_rank, 4 // ep)
        held = placed[full].held.get("tp")
        layout = Layout(expected[full][0].shape, ("tp",), (tp,), (_torch(held),))
        take = AttachedLayout(layout, (tp_rank,), (tp_group,)).take
        with torch.no_grad():
            parameter.copy_(take(expected[full][0]))
        pieces[local] = (full, take(expected[full][1]))
    rows = slice(dp_rank * BATCH // dp_group.size(), (dp_rank + 1) * BATCH // dp_group.size())
    found_loss = loss(model, rows)
    found_loss.backward()
    mean_loss = found_loss.detach().clone()
    dist.all_reduce(mean_loss, group=dp_group)
    torch.testing.assert_close(mean_loss / dp_group.size(), expected_loss.detach())
    different = []
    for local, parameter in model.named_parameters():
        full, piece = pieces[local]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        used = placed[full].in_use.get("tp")
        if used is not None and used.kind == "copy":
            dist.all_reduce(gradient, group=tp_group)
        if not getattr(parameter, "allreduce", True):
            gradient /= ep
            dist.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
            gradient /= parallel_state.get_expert_data_parallel_group().size()
        else:
            dist.all_reduce(gradient, group=dp_group)
            gradient /= dp_group.size()
        if (gradient - piece).norm() > 1e-4 * piece.norm().clamp(min=1e-3):
            different.append(full)
    return different


def _unblocked(held: Any) -> Any:
    from hp_plugin.core.dtensor import shard

    return {axis: shard(p.dim) if p.is_shard else p for axis, p in held.items()}


def _torch(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement is None else placement.as_torch()


def _whole_name(name: str, ep_rank: int, experts: int) -> str:
    return re.sub(r"local_experts\.(\d+)\.", lambda found: f"local_experts.{ep_rank * experts + int(found[1])}.", name)


def refusals() -> dict[str, str]:
    """What is refused of jobs on two ranks, and how."""
    from megatron.core import parallel_state

    from hp_plugin import UnsupportedError
    from hp_plugin.megatron.plan import plan_from_megatron

    found = {}
    wrapped.start(tensor_parallel=2, expert_parallel=2, expert_tensor_parallel=1)
    try:
        plan_from_megatron(
            make_gpt(
                "experts",
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                expert_model_parallel_size=2,
                expert_tensor_parallel_size=1,
            )
        )
    except UnsupportedError as error:
        found["etp"] = str(error)
    parallel_state.destroy_model_parallel()
    wrapped.start(pipeline_parallel=2, again=True)
    try:
        plan_from_megatron(make_gpt("dense"))
    except UnsupportedError as error:
        found["pp"] = str(error)
    return found
