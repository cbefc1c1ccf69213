"""A rank of stock Megatron that can resume with the distributed optimizer on CPU.

Stock looks for the step among the states of its optimizer before it reads a checkpoint. A fused Adam has it in its
groups; torch's Adam has no state before its first step, so that stock ends in an assertion. Here the states are made
first, by Megatron's own method for that; everything that is read afterwards is read by stock. Later it looks for the
step of every parameter among the tensors of a checkpoint, where no format has it; it has been set by then, but to one
tensor that all states share, and that torch's Adam would count up once for each of them.
"""

from __future__ import annotations

from typing import Any

from tests.megatron import training


def train(*, argv: list[str]) -> training.Run:
    """As `training.train`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_state_dict
    load = DistributedOptimizer.load_state_dict
    take_over = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict(self: Any, *args: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        loading = is_loading or any(value is True for value in args)
        if loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return original(self, *args, is_loading=is_loading, **kwargs) if is_loading else original(self, *args, **kwargs)

    def without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        take_over(self, model_param, {"step": None, **tensors})

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = without_step
    return training.train(argv=argv)
