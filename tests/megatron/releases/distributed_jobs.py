"""A rank of Megatron 0.12 that can train and resume with its distributed optimizer on CPU.

Without Transformer Engine stock fails where it would copy fp8 parameters, also where there are none: here that copies
nothing.

Stock asks its optimizer for the step before it reads a checkpoint. A fused Adam keeps it in its groups; torch's Adam
has no state before its first step. Here the states are made first. Later stock looks for the step of every parameter
among the tensors of a checkpoint, where no format has it; it is in the groups, from which stock has set it by then, but
as one tensor that all states share and that torch's Adam would count up once for each. All that is read is read by
stock.
"""

from __future__ import annotations

from typing import Any

from tests.megatron.releases import checkout
from tests.megatron.training import Run


def train(*, argv: list[str]) -> Run:
    """As `checkout.train`."""
    import torch
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def no_fp8_parameters(parameters: list[Any], *args: Any, **kwargs: Any) -> None:
        assert not parameters

    distrib_optimizer.quantize_param_shard = no_fp8_parameters

    describe = DistributedOptimizer.sharded_state_dict
    load = DistributedOptimizer.load_state_dict
    take_over = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict(self: Any, state: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    fresh = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                    self.optimizer.state[parameter] = {"step": torch.zeros(()), **fresh}
        return describe(self, state, is_loading, **kwargs)

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        take_over(self, model_param, {"step": state["step"], **tensors})

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    DistributedOptimizer.load_state_dict = load_state_dict
    return checkout.train(argv=argv)
