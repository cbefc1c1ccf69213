"""`--use-hypermuon`: Megatron's optimizer interface over `HyperMuon`, on HyperFSDP's shards and on stock DDP.

Norms, clipping, loss scale, masters and the order of a step are those of the optimizers that stand here without Muon:
`ShardOptimizer` on shards, Megatron's own on stock DDP. Only the torch optimizer inside is another, and what a
checkpoint has of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from hp_plugin.core.muon import HyperMuon
from hp_plugin.megatron import reporting
from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions
from hp_plugin.megatron.checkpoints import optimizer_parts, optimizer_state
from hp_plugin.megatron.checkpoints.opened import with_opened
from hp_plugin.megatron.fsdp.chained_shards import ChainedShardOptimizer
from hp_plugin.megatron.fsdp.shard_optimizer import ShardOptimizer, grad_scaler_of
from hp_plugin.megatron.muon import saved_state
from hp_plugin.megatron.muon.groups import Group, Ranks, make_muon, split_groups
from hp_plugin.megatron.muon.routing import Assignment, assign
from hp_plugin.megatron.releases.differences import unwrapped


class MuonShardOptimizer(ShardOptimizer):
    """`ShardOptimizer` whose matrices are trained by Muon."""

    muon_options: HyperMuonOptions

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
        sharding_type: str | None = None,
    ) -> dict[str, Any]:
        """As of `ShardOptimizer`; `momentum_buffer` of Muon's parameters beside the moments of AdamW's."""
        assert isinstance(self.optimizer, HyperMuon)
        metadata = with_opened(metadata) if is_loading else metadata
        with saved_state.whole_momentum(self.optimizer, is_loading=is_loading):
            described = optimizer_state.sharded_state_dict(
                self, model_sharded_state_dict, is_loading=is_loading, metadata=metadata
            )
        saved_state.describe(self, described, metadata, is_loading=is_loading)
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint delivered, whichever optimizer wrote it."""
        super().load_state_dict(state_dict)
        saved_state.finish_loading(self)

    @staticmethod
    def _filter_and_reorder_param_groups(current_groups: Any, state_dict_groups: Any) -> list[dict[str, Any]]:
        """Options of groups are those of the command line."""
        return [dict(group) for group in current_groups]


class _MuonOnDDP(MegatronOptimizer):
    """What the two optimizers on DDP share; one of Megatron's stands behind it in the order of resolution."""

    muon_options: HyperMuonOptions

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As stock's; `momentum_buffer` of Muon's parameters beside the moments of AdamW's."""
        if is_loading:
            metadata = with_opened(metadata)
            saved_state.refuse_flat_states(metadata)
        with saved_state.whole_momentum(self.optimizer, is_loading=is_loading):
            described: dict[str, Any] = super().sharded_state_dict(model_sharded_state_dict, is_loading)
        saved_state.describe(self, described, metadata, is_loading=is_loading)
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint delivered, whichever optimizer wrote it."""
        self._load(optimizer_parts.joined(state_dict))
        saved_state.finish_loading(self)

    def _load(self, state_dict: dict[Any, Any]) -> None:
        raise NotImplementedError


class MuonFP32Optimizer(_MuonOnDDP, FP32Optimizer):
    """Megatron's optimizer of fp32 models on DDP, with Muon inside."""

    def _load(self, state_dict: dict[Any, Any]) -> None:
        saved_state.load_inner(self, state_dict)


class MuonFloat16Optimizer(_MuonOnDDP, Float16OptimizerWithFloat16Params):
    """Megatron's optimizer of bf16 and fp16 models on DDP, which keeps fp32 masters, with Muon inside."""

    def _load(self, state_dict: dict[Any, Any]) -> None:
        saved_state.load_inner(self, state_dict["optimizer"])
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        for mine, loaded in zip(self.fp32_from_float16_groups, state_dict["fp32_from_fp16_params"]):
            for master, value in zip(mine, loaded):
                master.data.copy_(value.data)


class ChainedMuonOptimizer(ChainedOptimizer):
    """Optimizers on DDP, of dense parameters and of experts, as one."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what a checkpoint delivered, in however many parts it was saved; stock's wants the same number."""
        parts = self.chained_optimizers
        for part, state in zip(parts, optimizer_parts.split(state_dict, len(parts))):
            part.load_state_dict(state)


def build(parts: Sequence[Any], config: Any, model_chunks: Sequence[Any], options: HyperMuonOptions) -> Any:
    """The optimizer of a job. Every rank must call.

    Args:
        parts: What stock built as fp32 optimizers with Adam: one part, or one of dense and one of expert parameters.
        config: Megatron's `OptimizerConfig`.
        model_chunks: In HyperFSDP or in stock's DDP.
        options: Of Muon.

    Returns:
        A `MegatronOptimizer`.
    """
    ranks = Ranks(parallel_state.get_tensor_model_parallel_group(), _expert_tp_group())
    models = [unwrapped(chunk) for chunk in model_chunks]
    assigned, routing = assign(models, options, tp_size=ranks.tp_size(False), group=dist.group.WORLD)
    reporting.say("Muon and AdamW share the parameters of this model as follows.\n" + routing.table())
    on_shards = hasattr(model_chunks[0], "mesh")
    make = _on_shards if on_shards else _on_ddp
    built: list[Any] = [make(part, config, list(model_chunks), options, assigned, ranks) for part in parts]
    if len(built) == 1:
        return built[0]
    return ChainedShardOptimizer(built) if on_shards else ChainedMuonOptimizer(built)


def _on_shards(
    part: Any,
    config: Any,
    chunks: list[Any],
    options: HyperMuonOptions,
    assigned: dict[int, Assignment],
    ranks: Ranks,
) -> MuonShardOptimizer:
    groups = _groups(part, assigned)
    parameters = [parameter for _, group in groups for parameter in group["params"]]
    distributions = {
        id(parameter): ranks.distribution(parameter, assigned[id(parameter)], None, options)
        for parameter in parameters
        if assigned[id(parameter)].algorithm == "muon"
    }
    muon = make_muon(
        groups,
        {id(parameter): parameter for parameter in parameters},
        assigned,
        distributions,
        options,
        config,
        stock_defaults=part.optimizer.defaults,
        known_groups=_known_groups(),
    )
    made = MuonShardOptimizer(muon, config, model_chunks=chunks, parameters=parameters, masters=parameters, stock=part)
    made.muon_options = options
    return made


def _on_ddp(
    part: Any,
    config: Any,
    chunks: list[Any],
    options: HyperMuonOptions,
    assigned: dict[int, Assignment],
    ranks: Ranks,
) -> MuonFP32Optimizer | MuonFloat16Optimizer:
    """Stock's class is built over the groups and makes masters; then Muon takes the place of what it holds."""
    groups = _groups(part, assigned)
    parameters = [parameter for _, group in groups for parameter in group["params"]]
    distributions = {
        id(parameter): ranks.distribution(parameter, assigned[id(parameter)], _replicas(parameter), options)
        for parameter in parameters
        if assigned[id(parameter)].algorithm == "muon"
    }
    holder = torch.optim.SGD([{**group, "params": list(group["params"])} for _, group in groups], lr=0.0)
    made: MuonFP32Optimizer | MuonFloat16Optimizer
    if config.bf16 or config.fp16:
        made = MuonFloat16Optimizer(holder, config, grad_scaler_of(config), _nothing)
    else:
        made = MuonFP32Optimizer(holder, config, _nothing)
    masters = [master for group in holder.param_groups for master in group["params"]]
    made.optimizer = make_muon(
        groups,
        {id(parameter): master for parameter, master in zip(parameters, masters, strict=True)},
        assigned,
        distributions,
        options,
        config,
        stock_defaults=part.optimizer.defaults,
        known_groups=_known_groups(),
    )
    made.muon_options = options
    for name in ("grad_stats_parallel_group", "tp_group", "expert_tp_group"):
        if hasattr(part, name):
            setattr(made, name, getattr(part, name))
    return made


def _groups(part: Any, assigned: dict[int, Assignment]) -> list[tuple[Any, Group]]:
    return split_groups([] if part.optimizer is None else part.optimizer.param_groups, assigned)


def _nothing(optimizer: HyperMuon, config: Any = None) -> None:
    """In the place of Megatron's function that makes states before a checkpoint is read: they exist."""


def _replicas(parameter: torch.Tensor) -> dist.ProcessGroup:
    """The ranks between which stock's DDP reduces a gradient."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _expert_tp_group() -> dist.ProcessGroup | None:
    return parallel_state.get_expert_tensor_parallel_group(check_initialized=False)


def _known_groups() -> list[dist.ProcessGroup]:
    """Groups that Megatron has made already and that may be those of an exchange."""
    found = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_and_data_parallel_group(check_initialized=False, with_context_parallel=True),
    ]
    return [group for group in found if group is not None]
