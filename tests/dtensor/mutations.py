"""More faults, put into a decoder with experts on data-, expert- and tensor-parallel ranks under `fully_shard`.

Like those of `faults` they change code or data that the model runs, and never what checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor import applied_plan
from hp_plugin.core.layout import local_tensor

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        put: Puts it into the planned and sharded model.
        module: Where it lies; of a norm, whose output no plan names, what takes it; None where it is in none.
        kind: What is found wrong there.
        source: The public report that has it.
        sequence_parallel: Whether the plan has the sequence divided outside of tensor-parallel regions.
    """

    put: Callable[[nn.Module], None]
    module: str | None
    kind: str
    source: str = ""
    sequence_parallel: bool = True


def _rank(model: nn.Module, axis: str) -> int:
    return int(applied_plan(model).lines[axis].rank)  # type: ignore[union-attr]


def _after(model: nn.Module, name: str, change: Change) -> None:
    """Changes what a module gives to its callers."""
    model.get_submodule(name).register_forward_hook(lambda module, args, output: change(output))


def _boundary(model: nn.Module, name: str, **fields: Any) -> None:
    module = model.get_submodule(name)
    module._hp_boundary = dataclasses.replace(module._hp_boundary, **fields)  # type: ignore[arg-type]


def _with(value: torch.Tensor, gradient: Change) -> torch.Tensor:
    """The value as it is, with another gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return gradient(grad)

    return Changed.apply(value)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- tensor parallelism


def input_gradient_is_summed_twice(model: nn.Module) -> None:
    boundary: Any = model.get_submodule("layers.1.attention")._hp_boundary
    [(position, name, steps)] = boundary.inputs
    _boundary(model, "layers.1.attention", inputs=((position, name, (*steps, *steps)),))


def copies_of_a_norm_differ(model: nn.Module) -> None:
    if _rank(model, "tp") == 1:
        with torch.no_grad():
            local_tensor(model.get_submodule("layers.1.norm1").weight).mul_(1.01)  # type: ignore[arg-type]


def key_heads_are_exchanged(model: nn.Module) -> None:
    """One rank's keys belong to other positions of their head."""
    if _rank(model, "tp") == 1:
        _after(model, "layers.0.attention.wk", lambda y: y.roll(y.shape[-1] // 2, -1))


def scores_of_queries_are_scaled_by_the_axis(model: nn.Module) -> None:
    _after(model, "layers.1.attention.wq", lambda y: y / 2)


def output_is_rounded(model: nn.Module) -> None:
    _after(model, "layers.1.attention", lambda y: y.bfloat16().to(y.dtype))


def sequence_is_reversed(model: nn.Module) -> None:
    _after(model, "layers.0.attention", lambda y: y.flip(1))


def features_are_exchanged(model: nn.Module) -> None:
    _after(model, "layers.0.norm2", lambda y: y.roll(y.shape[-1] // 2, -1))


def output_bias_counts_twice(model: nn.Module) -> None:
    bias = model.get_submodule("layers.0.norm1").bias
    _after(model, "layers.0.norm1", lambda y: y + local_tensor(bias).mean() * 0 + 0.01)  # type: ignore[arg-type]


def logits_of_one_rank_are_late(model: nn.Module) -> None:
    """One rank's piece of the logits is that of the position before."""
    if _rank(model, "tp") == 1:
        _after(model, "output", lambda y: y.roll(1, 1))


# ---------------------------------------------------------------- gradients


def backward_of_half_the_features(model: nn.Module) -> None:
    def change(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[..., : grad.shape[-1] // 2] = 0
        return grad

    _before(model, "layers.0.attention.wv", lambda x: _with(x, change))


def _before(model: nn.Module, name: str, change: Change) -> None:
    """Changes what a module works on, behind its boundary's steps for the input."""
    module: Any = model.get_submodule(name)
    module.register_forward_pre_hook(lambda owner, args: (change(args[0]), *args[1:]))


def gradient_of_a_product_is_doubled(model: nn.Module) -> None:
    _before(model, "layers.1.attention.wq", lambda x: _with(x, lambda grad: 2 * grad))


def tied_weight_counts_once(model: nn.Module) -> None:
    """The embedding's use of the weight that it shares with the output gives no gradient."""
    _after(model, "tokens", lambda y: y.detach().requires_grad_())


# ---------------------------------------------------------------- data parallelism


def gradients_are_sums(model: nn.Module) -> None:
    """Sums over the data-parallel ranks where means belong."""
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]


def gradients_of_one_layer_are_sums(model: nn.Module) -> None:
    model.get_submodule("layers.1").set_gradient_divide_factor(1.0, recurse=False)  # type: ignore[operator]


def half_of_the_batch_is_dropped(model: nn.Module) -> None:
    """The other rank's half has no gradient, though its loss counts."""
    if _rank(model, "ep") == 1:
        _after(model, "", lambda y: _with(y, torch.zeros_like))


def one_shard_stays_behind(model: nn.Module) -> None:
    """One rank does not update its rows of one weight."""
    if _rank(model, "ep") == 1:
        weight = model.get_submodule("layers.0.attention").wo.weight  # type: ignore[union-attr]
        _without_update(weight)  # type: ignore[arg-type]


def _without_update(weight: nn.Parameter) -> None:
    step = torch.optim.SGD.step

    @torch.no_grad()
    def stale(self: torch.optim.SGD, *args: Any) -> Any:
        held = any(parameter is weight for group in self.param_groups for parameter in group["params"])
        before = local_tensor(weight).detach().clone()
        result = step(self, *args)
        if held:
            local_tensor(weight).copy_(before)
        return result

    torch.optim.SGD.step = stale  # type: ignore[method-assign]


# ---------------------------------------------------------------- experts


def experts_count_by_half_more(model: nn.Module) -> None:
    _after(model, "layers.1.mlp.experts", lambda y: y * 1.5)


def tokens_go_to_other_experts(model: nn.Module) -> None:
    module: Any = model.get_submodule("layers.0.mlp.experts")
    module.register_forward_pre_hook(lambda owner, args: (args[0], args[1] ^ 1, *args[2:]))


def weights_of_the_router_are_left_out(model: nn.Module) -> None:
    module: Any = model.get_submodule("layers.0.mlp.experts")
    module.register_forward_pre_hook(lambda owner, args: (*args[:2], torch.ones_like(args[2]) / 2))


def a_token_is_dropped(model: nn.Module) -> None:
    """The first token of one rank reaches no expert."""
    if _rank(model, "ep") == 1:
        module: Any = model.get_submodule("layers.1.mlp.experts")

        def drop(owner: Any, args: Any) -> Any:
            weights = args[2].clone()
            weights[0] = 0
            return (*args[:2], weights)

        module.register_forward_pre_hook(drop)


def gradients_of_experts_are_divided_by_another_number(model: nn.Module) -> None:
    model.get_submodule("layers.1.mlp.experts").set_gradient_divide_factor(4.0, recurse=False)  # type: ignore[operator]


# ---------------------------------------------------------------- written after the last change of what checks them


def one_summand_is_missing(model: nn.Module) -> None:
    if _rank(model, "tp") == 1:
        _after(model, "layers.0.attention.wo", lambda y: 0 * y)


def routers_disagree(model: nn.Module) -> None:
    """One tensor-parallel rank prefers an expert more than the others do."""
    if _rank(model, "tp") == 1:
        _after(model, "layers.1.mlp.router", lambda y: y + torch.eye(y.shape[-1], dtype=y.dtype)[0])


def positions_are_late(model: nn.Module) -> None:
    if _rank(model, "ep") == 1:
        _after(model, "positions", lambda y: y.roll(1, 0))


def values_of_one_rank_are_scaled(model: nn.Module) -> None:
    if _rank(model, "tp") == 0:
        _after(model, "layers.1.attention.wv", lambda y: 1.1 * y)


def router_learns_nothing(model: nn.Module) -> None:
    _after(model, "layers.0.mlp.router", torch.Tensor.detach)


def gradient_into_the_router_is_doubled(model: nn.Module) -> None:
    _before(model, "layers.0.mlp.router", lambda x: _with(x, lambda grad: 2 * grad))


def noise_is_added(model: nn.Module) -> None:
    _after(model, "layers.0.attention", lambda y: y + 1e-3 * torch.rand_like(y))


def one_expert_is_rounded(model: nn.Module) -> None:
    if _rank(model, "ep") == 1:
        weight = local_tensor(model.get_submodule("layers.1.mlp.experts").down_proj)  # type: ignore[arg-type]
        with torch.no_grad():
            weight[0] = weight[0].bfloat16().to(weight.dtype)


def rows_of_the_vocabulary_are_scaled(model: nn.Module) -> None:
    """The tied weight is another one on one tensor-parallel rank; the embedding uses it first."""
    if _rank(model, "tp") == 1:
        with torch.no_grad():
            local_tensor(model.get_submodule("tokens").weight).mul_(1.01)  # type: ignore[arg-type]


def a_layer_is_left_out_for_half_of_the_batch(model: nn.Module) -> None:
    if _rank(model, "ep") == 1:
        _after(model, "layers.1.attention", lambda y: 0 * y)


AFTER_THE_FREEZE: dict[str, Mutation] = {
    mutation.put.__name__: mutation
    for mutation in (
        Mutation(one_summand_is_missing, "layers.0.attention", "output"),
        Mutation(routers_disagree, "layers.1.mlp", "output"),
        Mutation(positions_are_late, "layers.0", "output"),
        Mutation(values_of_one_rank_are_scaled, "layers.1.attention", "output"),
        Mutation(router_learns_nothing, "layers.0.mlp", "gradient"),
        Mutation(gradient_into_the_router_is_doubled, "layers.0.mlp", "input_gradient"),
        Mutation(noise_is_added, "layers.0.attention", "output"),
        Mutation(one_expert_is_rounded, "layers.1.mlp", "output"),
        Mutation(rows_of_the_vocabulary_are_scaled, "tokens", "output"),
        Mutation(a_layer_is_left_out_for_half_of_the_batch, "layers.1.attention", "output"),
    )
}

MUTATIONS: dict[str, Mutation] = {
    mutation.put.__name__: mutation
    for mutation in (
        Mutation(input_gradient_is_summed_twice, "layers.1.attention", "input_gradient", sequence_parallel=False),
        Mutation(copies_of_a_norm_differ, "layers.1.attention", "output"),
        Mutation(key_heads_are_exchanged, "layers.0.attention", "output"),
        Mutation(scores_of_queries_are_scaled_by_the_axis, "layers.1.attention", "output"),
        Mutation(output_is_rounded, "layers.1.attention", "output"),
        Mutation(sequence_is_reversed, "layers.0.attention", "output"),
        Mutation(features_are_exchanged, "layers.0.mlp", "output"),
        Mutation(output_bias_counts_twice, "layers.0.attention", "output"),
        Mutation(logits_of_one_rank_are_late, "output", "output"),
        Mutation(backward_of_half_the_features, "layers.0.attention", "input_gradient"),
        Mutation(gradient_of_a_product_is_doubled, "layers.1.attention", "input_gradient"),
        Mutation(tied_weight_counts_once, "tokens", "gradient", "Megatron-LM PR 3023"),
        Mutation(gradients_are_sums, "", "gradient"),
        Mutation(gradients_of_one_layer_are_sums, "layers.1", "gradient"),
        Mutation(half_of_the_batch_is_dropped, None, "output_gradient"),
        Mutation(one_shard_stays_behind, None, "weight"),
        Mutation(experts_count_by_half_more, "layers.1.mlp", "output"),
        Mutation(tokens_go_to_other_experts, "layers.0.mlp", "output"),
        Mutation(weights_of_the_router_are_left_out, "layers.0.mlp", "output"),
        Mutation(a_token_is_dropped, "layers.1.mlp", "output"),
        Mutation(gradients_of_experts_are_divided_by_another_number, "layers.1.mlp", "gradient"),
    )
} | AFTER_THE_FREEZE
