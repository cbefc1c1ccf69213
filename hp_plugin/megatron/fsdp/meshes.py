"""The data-parallel meshes of a Megatron job: one for expert parameters, one for all others.

Under expert parallelism a rank holds some experts only, and fewer ranks hold the same experts than hold the same
attention. Megatron has process groups for both, and both become `(dp_replicate, dp_shard)` meshes by the same rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.fsdp.experts import expert_shard_size
from hp_plugin.core.topology import Topology, mesh_from_group
from hp_plugin.megatron.fsdp.data_parallel import WrapperOptions


class Meshes(NamedTuple):
    """Meshes of the parameters of a rank.

    Attributes:
        dense: Of the data- and context-parallel group of this rank.
        expert: Of its expert-data-parallel group; None where experts have no group of their own.
    """

    dense: DeviceMesh
    expert: DeviceMesh | None


def make_meshes(config: Any, pg_collection: Any, options: WrapperOptions, device: torch.device) -> Meshes:
    """The meshes of this rank. Every rank of the default group must call: process groups are made.

    Args:
        config: The model's `TransformerConfig`.
        pg_collection: Process groups; Megatron's global ones if None.
        options: Supernodes and size of shards.
        device: Where parameters live.
    """
    topology = Topology.detect(options.supernode_size)

    def make(group: dist.ProcessGroup, shard_size: Any) -> DeviceMesh:
        return mesh_from_group(
            group,
            topology,
            shard_size=shard_size,
            device_type=device.type,
            allow_cross_supernode=options.shard_size == "world",
        )

    dense = make(data_parallel_group(pg_collection), options.shard_size)
    if not has_expert_groups(config):
        return Meshes(dense, None)
    group = expert_data_parallel_group(pg_collection)
    shard_size = expert_shard_size(options.shard_size, dist.get_process_group_ranks(group), topology)
    return Meshes(dense, make(group, shard_size))


def data_parallel_group(pg_collection: Any) -> dist.ProcessGroup:
    """Ranks that hold the same dense parameters: the data-parallel ones, with context parallelism."""
    group = getattr(pg_collection, "dp_cp", None)
    return parallel_state.get_data_parallel_group(with_context_parallel=True) if group is None else group


def expert_data_parallel_group(pg_collection: Any) -> dist.ProcessGroup:
    """Ranks that hold the same experts."""
    group = getattr(pg_collection, "expt_dp", None)
    return parallel_state.get_expert_data_parallel_group() if group is None else group


def has_expert_groups(config: Any) -> bool:
    """Whether Megatron marks expert parameters as belonging to groups of their own; alike on all ranks of a job."""
    if getattr(config, "num_moe_experts", None) is None:
        return False
    tensor = config.tensor_model_parallel_size
    expert_tensor = getattr(config, "expert_tensor_parallel_size", None)
    return bool(config.expert_model_parallel_size > 1 or (expert_tensor is not None and expert_tensor != tensor))
