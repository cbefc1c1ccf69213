"""Layers of `deepspeed.moe`: the experts of a rank, the ranks that hold the same, and what an expert is called by all.

With `ep_size` e, e consecutive data-parallel ranks hold different experts and exchange tokens; ranks a multiple of e
apart hold the same. DeepSpeed has process groups for both, named by `ep_size`. A rank numbers its experts from 0; in
checkpoints they have their numbers among all experts of the layer, so that they load at any `ep_size`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.fsdp.experts import expert_shard_size, is_expert
from hp_plugin.core.optim.clip import total_grad_norm
from hp_plugin.core.topology import Topology, mesh_from_group
from hp_plugin.errors import UnsupportedError

_EXPERT = re.compile(r"^(?P<layer>.*?)deepspeed_moe\.experts\.deepspeed_experts\.(?P<index>\d+)\.(?P<rest>.*)$")
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of all layers with one `ep_size`.

    Attributes:
        mesh: `("dp_replicate", "dp_shard")` over the ranks that hold the same experts.
        data_parallel: Those ranks.
        parallel: The ranks that together hold all experts of a layer, each once.
    """

    mesh: DeviceMesh
    data_parallel: dist.ProcessGroup
    parallel: dist.ProcessGroup

    @property
    def size(self) -> int:
        """`ep_size`."""
        return self.parallel.size()

    @property
    def rank(self) -> int:
        """Position of this rank among those that hold different experts."""
        return self.parallel.rank()


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        groups: By the name that DeepSpeed puts on parameters as `group_name`; empty for a model without experts.
        local_counts: How many experts of each layer a rank holds, by the name of the layer with a dot at the end.
        group_names: The group of each layer, likewise.
    """

    groups: dict[str, ExpertGroup] = field(default_factory=dict)
    local_counts: dict[str, int] = field(default_factory=dict)
    group_names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, dense: DeviceMesh, data_parallel: Any, topology: Topology, shard_size: Any
    ) -> Experts:
        """The experts of a model whose process groups DeepSpeed has made. Every rank of the default group must call.

        Args:
            model: Not sharded yet.
            dense: The mesh of all other parameters.
            data_parallel: Its process group.
            topology: Which ranks share a supernode.
            shard_size: Of dense parameters, as for `mesh_from_group`.

        Raises:
            UnsupportedError: Experts were built under `zero.Init`, or lie outside the layers of `deepspeed.moe`.
        """
        found = cls()
        for name, parameter in model.named_parameters():
            if not is_expert(parameter):
                continue
            match = _EXPERT.match(_plain(name))
            if match is None:
                raise UnsupportedError(
                    f"{name} is marked as an expert (allreduce=False), but is in no layer of deepspeed.moe, so its "
                    "number among all experts is not known; use deepspeed.moe.layer.MoE."
                )
            if hasattr(parameter, "ds_id") or not parameter.numel():  # copies of partitions are empty
                raise UnsupportedError(
                    f"the expert {name} was built under zero.Init, which gives all ranks the experts of the first; "
                    "build layers of deepspeed.moe outside deepspeed.zero.Init."
                )
            layer = match["layer"]
            found.local_counts[layer] = max(found.local_counts.get(layer, 0), int(match["index"]) + 1)
            found.group_names[layer] = vars(parameter)["group_name"]
        for name in sorted(set(found.group_names.values())):
            found.groups[name] = _group(name, dense, data_parallel, topology, shard_size)
        return found

    def group_of(self, parameter: torch.Tensor) -> ExpertGroup | None:
        """The group of an expert's parameter; None for any other."""
        return self.groups[vars(parameter)["group_name"]] if self.groups and is_expert(parameter) else None

    def global_name(self, name: str, *, owner: int | None = None) -> str:
        """A parameter's name, with an expert's number among all of its layer.

        Args:
            name: On this rank.
            owner: On the rank at that position of the expert-parallel group; None is this rank.
        """
        match = _EXPERT.match(_plain(name)) if self.groups else None
        if match is None:
            return name
        layer = match["layer"]
        position = self.groups[self.group_names[layer]].rank if owner is None else owner
        number = position * self.local_counts[layer] + int(match["index"])
        return f"{layer}deepspeed_moe.experts.deepspeed_experts.{number}.{match['rest']}"

    def full_values(self, name: str, parameter: torch.Tensor, full: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The full value of a parameter of every rank that holds another expert, by its name in checkpoints.

        Every rank must call, with the parameters in the same order. One value at a time is in memory.

        Args:
            name: On this rank.
            parameter: As it rests.
            full: Its full value: plain, contiguous.
        """
        group = self.group_of(parameter)
        if group is None or group.size == 1:
            yield self.global_name(name), full
            return
        for owner in range(group.size):
            value = full.clone() if owner == group.rank else torch.empty_like(full)
            dist.broadcast(value, dist.get_global_rank(group.parallel, owner), group=group.parallel)
            yield self.global_name(name, owner=owner), value

    def total_grad_norm(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients, those of other ranks' experts included. Every rank must call."""
        if not self.groups:
            return total_grad_norm(parameters)
        squared = total_grad_norm([p for p in parameters if not is_expert(p)]).square()
        for name, group in self.groups.items():
            part = total_grad_norm([p for p in parameters if is_expert(p) and vars(p)["group_name"] == name]).square()
            part = part.to(squared.device)
            dist.all_reduce(part, group=group.parallel)
            squared = squared.to(part.device) + part
        return squared.sqrt()


def _plain(name: str) -> str:
    """A name without the wrappers that torch's state dicts leave out."""
    return _WRAPPERS.sub("", name)


def _group(name: str, dense: DeviceMesh, data_parallel: Any, topology: Topology, shard_size: Any) -> ExpertGroup:
    same = groups._get_expert_data_parallel_group(name)
    ranks = dist.get_process_group_ranks(same)
    if ranks == dist.get_process_group_ranks(data_parallel):  # ep_size 1; alike on all ranks
        mesh = dense
    else:
        mesh = mesh_from_group(
            same,
            topology,
            shard_size=expert_shard_size(shard_size, ranks, topology),
            device_type=dense.device_type,
            allow_cross_supernode=shard_size == "world",
        )
    return ExpertGroup(mesh, same, groups._get_expert_parallel_group(name))
