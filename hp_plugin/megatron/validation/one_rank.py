"""A context in which Megatron takes this process for the only one of its job."""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist

_ALONE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "overlap_p2p_comm": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "distribute_saved_activations": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""What arguments and configurations say of one rank, as far as a release has them."""

_ARGUMENTS: dict[str, Any] = {
    **_ALONE,
    "transformer_pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "data_parallel_size": 1,
    "data_parallel_random_init": False,
    "use_hyperfsdp": False,
    "load": None,
    "pretrained_checkpoint": None,
    "ckpt_convert_format": None,
    "log_num_zeros_in_grad": False,
}
"""The same of arguments alone."""

CONFIGURATION: dict[str, Any] = {
    **_ALONE,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}
"""The same of Megatron's `TransformerConfig` and `DistributedDataParallelConfig`."""

_OF_STAGES = ("_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GROUP")
_RANKS_OF_STAGES = ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS")
_TRACKERS: tuple[tuple[str, str, Any], ...] = (
    ("megatron.core.parallel_state", "_MOE_LAYER_WISE_LOGGING_TRACKER", {}),
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER", {}),
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER", None),
)
"""Where releases add up what routers report: module, name, and the value at the start of a step."""


@dataclass(frozen=True)
class MicroBatches:
    """What stands for Megatron's calculator of the number of micro-batches.

    Attributes:
        number: Of micro-batches in a step.
        micro_batch_size: Samples of one.
    """

    number: int
    micro_batch_size: int

    def get(self) -> int:
        """Micro-batches of a step."""
        return self.number

    def get_current_global_batch_size(self) -> int:
        """Samples of a step."""
        return self.number * self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Samples of a step."""
        return self.number * self.micro_batch_size

    def get_micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.micro_batch_size

    def update(self, *unused: Any, **unused_too: Any) -> None:
        """Nothing changes."""


class OneRank:
    """Enters and leaves the context. Every rank of the job must construct it at the same time; groups are made once."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._group = dist.new_group([self._rank], use_local_synchronization=True)
        backend = dist.get_backend(self._group)
        self._gloo = self._group
        if backend != "gloo":
            self._gloo = dist.new_group([self._rank], backend="gloo", use_local_synchronization=True)

    @contextlib.contextmanager
    def active(self, micro_batches: MicroBatches) -> Iterator[None]:
        """Within it, Megatron's functions see one rank, and steps have `micro_batches`."""
        from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
        from megatron.training import get_args

        alone = rerun_state_machine.RerunStateMachine()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_random_states_kept())
            stack.enter_context(_arguments(get_args()))
            stack.enter_context(_attributes(parallel_state, self._alone(parallel_state)))
            counted = {"_GLOBAL_NUM_MICROBATCHES_CALCULATOR": micro_batches}
            stack.enter_context(_attributes(num_microbatches_calculator, counted))
            stack.enter_context(_attributes(rerun_state_machine, {"_GLOBAL_RERUN_STATE_MACHINE": alone}))
            for name, tracker, empty in _TRACKERS:
                if hasattr(sys.modules.get(name), tracker):
                    stack.enter_context(_attributes(sys.modules[name], {tracker: copy.copy(empty)}))
            yield

    def _alone(self, parallel_state: ModuleType) -> dict[str, Any]:
        """The module-level state of `parallel_state`, with every group and list of ranks cut down to this rank."""
        found: dict[str, Any] = {}
        for name, value in vars(parallel_state).items():
            if not name.startswith("_") or name.startswith("__"):
                continue
            if name in _OF_STAGES or isinstance(value, dist.ProcessGroup):
                found[name] = self._gloo if name.endswith("_GLOO") else self._group
            elif name in _RANKS_OF_STAGES or (_is_list(value) and all(isinstance(item, int) for item in value)):
                found[name] = [self._rank]
            elif _is_list(value) and all(isinstance(item, dist.ProcessGroup) for item in value):
                found[name] = [self._group] * len(value)
            elif name.startswith(("_MPU_", "_VIRTUAL_")):
                found[name] = None
        return found


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0


@contextlib.contextmanager
def _attributes(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


@contextlib.contextmanager
def _arguments(args: argparse.Namespace) -> Iterator[None]:
    """The arguments of one rank in Megatron's own namespace, to which many have references."""
    kept = dict(vars(args))
    try:
        vars(args).update({name: value for name, value in _ARGUMENTS.items() if name in kept})
        yield
    finally:
        vars(args).clear()
        vars(args).update(kept)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = None if accelerator is None else torch.get_device_module(accelerator)
    of_torch, of_numpy, of_python = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    of_device = None if device is None else device.get_rng_state()
    of_tracker = dict(tracker.get_states())
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        numpy.random.set_state(of_numpy)
        random.setstate(of_python)
        if device is not None:
            device.set_rng_state(of_device)
        tracker.set_states(of_tracker)
