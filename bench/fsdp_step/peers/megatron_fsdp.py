"""megatron-fsdp (the version inside megatron-core), HSDP over both tiers, under the CPU compatibility layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.fsdp_step.model import Block
from bench.fsdp_step.peers.megatron import quiet, require_megatron
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant, take_options
from hp_plugin.core.layout import local_tensor


class MegatronFSDP(Variant):
    """ZeRO-3 inside the supernode, replicated between supernodes, both overlaps on."""

    def __init__(self, context: Context, options: Options) -> None:
        require_megatron()
        from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model, fully_shard_optimizer

        # Without a tensor-parallel axis it does not find its own meshes, so there is one of size 1.
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", (*context.mesh.shape, 1), mesh_dim_names=names)
        with quiet():
            wrapped: Any = fully_shard_model(
                context.model(),
                device_mesh=mesh,
                dp_shard_dim="dp_shard",
                dp_outer_dim="dp_replicate",
                tp_dim="tp",
                hybrid_fsdp_group=dist.group.WORLD,
                fsdp_unit_modules=[Block],
                zero_dp_strategy=3,
                device=torch.device("cpu"),
                overlap_grad_reduce=True,
                overlap_param_gather=True,
            )
            # Scales gradients itself: gloo has no PREMUL_SUM. fully_shard_model does not pass the option on.
            wrapped.ddp_config.gradient_reduce_div_fusion = False
            self.module = wrapped
            self.optimizer = context.adamw(self.module.parameters())
            self._make_state(fully_shard_optimizer, context.weight_decay)
        self.norm_group = context.shard_group

    def _make_state(self, fully_shard_optimizer: Callable[..., Any], weight_decay: float) -> None:
        """megatron-fsdp makes the state by a step with zero gradients; undoes what that step does beside."""
        groups = self.optimizer.param_groups
        for group in groups:
            group["weight_decay"] = 0.0
        fully_shard_optimizer(self.optimizer)
        for group in groups:
            group["weight_decay"] = weight_decay
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def local_gradients(self) -> list[torch.Tensor]:
        """The shards."""
        gradients = [p.grad for p in self.module.parameters()]
        return [local_tensor(gradient) for gradient in gradients if gradient is not None]

    def facts(self) -> dict[str, Any]:
        """Its own configuration."""
        config: Any = self.module.ddp_config
        return {
            "strategy": config.data_parallel_sharding_strategy,
            "overlap_grad_reduce": config.overlap_grad_reduce,
            "overlap_param_gather": config.overlap_param_gather,
        }


def build_megatron_fsdp(context: Context, options: Options) -> Variant:
    """megatron-fsdp; it has no options here."""
    return MegatronFSDP(context, take_options("megatron_fsdp", options))
