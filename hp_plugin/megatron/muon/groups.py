"""`HyperMuon` out of the parameter groups that stock Megatron makes.

Stock decides which parameters share a group, with which multipliers and overrides. Each of its groups becomes a group
of Muon and one of AdamW with the same entries, so that Megatron's scheduler, which sets `lr` and `weight_decay` by
them, goes on as it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from hp_plugin.core.muon import HyperMuon
from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.communicator import GroupCommunicators
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.routing import Algorithm
from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions
from hp_plugin.megatron.muon.layout import RankGrid, TensorParallelCut, distribution_of
from hp_plugin.megatron.muon.routing import Assignment

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ALGORITHMS: tuple[Algorithm, ...] = ("muon", "adamw")

Group = dict[str, Any]


def split_groups(groups: Sequence[Group], assigned: Mapping[int, Assignment]) -> list[tuple[Algorithm, Group]]:
    """Stock's groups, each divided by who trains its parameters. Every rank of the default group must call.

    All ranks get the same groups in the same order, some of them empty: a checkpoint has one list of groups for the
    whole job. Stock gives all ranks the same groups, but up to 0.12 not in the same order.

    Args:
        groups: Of stock's optimizer.
        assigned: By `id` of the parameter.
    """
    found = [
        (algorithm, {**group, "params": [p for p in group["params"] if assigned[id(p)].algorithm == algorithm]})
        for group in groups
        for algorithm in _ALGORITHMS
    ]
    mine = [(identity_of(algorithm, group), bool(group["params"])) for algorithm, group in found]
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return in_common_order(found, everyone)


def in_common_order(
    found: Sequence[tuple[Algorithm, Group]], everyone: Sequence[Sequence[tuple[str, bool]]]
) -> list[tuple[Algorithm, Group]]:
    """The groups that some rank has parameters for, in the order of the first rank.

    Args:
        found: Of this rank.
        everyone: Of each rank, the identities of its groups and whether they have parameters.
    """
    by_identity = {identity_of(algorithm, group): (algorithm, group) for algorithm, group in found}
    used = {identity for rank in everyone for identity, has_parameters in rank if has_parameters}
    order = dict.fromkeys(identity for rank in everyone for identity, _ in rank)
    return [by_identity[identity] for identity in order if identity in used]


def identity_of(algorithm: Algorithm, group: Group) -> str:
    """What tells a group from others, on every rank alike: all that it has but its parameters."""
    return repr((algorithm, sorted((name, repr(value)) for name, value in group.items() if name != "params")))


def learning_rates(
    group: Mapping[str, Any], algorithm: Algorithm, options: HyperMuonOptions, *, lr: float, min_lr: float
) -> tuple[float, float]:
    """The largest and the smallest learning rate of a group, between which Megatron's scheduler moves.

    A group that stock gave a learning rate of its own (`--decoupled-lr`, overrides) keeps it.

    Args:
        group: Of stock, with `max_lr` and `min_lr`.
        algorithm: Who trains it.
        options: Ours.
        lr: `--lr`.
        min_lr: `--min-lr`.
    """
    largest, smallest = group.get("max_lr", lr), group.get("min_lr", min_lr)
    if largest != lr:
        return largest, smallest
    own, own_min = (options.lr, options.min_lr) if algorithm == "muon" else (options.adam_lr, options.adam_min_lr)
    if own is not None:
        # A schedule of the same shape.
        largest, smallest = own, smallest * (own / lr) if lr else smallest
    return largest, smallest if own_min is None else own_min


class Ranks:
    """The ranks that hold parts or copies of parameters, learnt once for each mesh.

    Args:
        tp_group: Tensor-parallel group.
        expert_tp_group: That of routed experts.
    """

    def __init__(self, tp_group: dist.ProcessGroup, expert_tp_group: dist.ProcessGroup | None) -> None:
        self._tp = {False: tp_group, True: tp_group if expert_tp_group is None else expert_tp_group}
        self._grids: dict[tuple[Any, bool], RankGrid] = {}

    def tp_size(self, is_expert: bool) -> int:
        """Number of tensor-parallel ranks."""
        return self._tp[is_expert].size()

    def distribution(
        self,
        parameter: torch.Tensor,
        assignment: Assignment,
        replicas: dist.ProcessGroup | None,
        options: HyperMuonOptions,
    ) -> Distribution:
        """Of one parameter. Ranks of a tensor-parallel group must ask in the same order.

        Args:
            parameter: Of the model.
            assignment: Of it.
            replicas: The ranks that have copies of a plain tensor; None for a `DTensor`.
            options: Whether the whole matrix is orthogonalized.
        """
        group = self._tp[assignment.is_expert]
        placements: tuple[Placement, ...]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(mesh.ndim))
            ranks, sizes = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape)
            placements = parameter.placements
        else:
            assert replicas is not None
            ranks = tuple(dist.get_process_group_ranks(replicas))
            names, sizes, placements = ("dp",), (len(ranks),), (Replicate(),)
        key = ((ranks, sizes), assignment.is_expert)
        if key not in self._grids:
            self._grids[key] = RankGrid.gather(ranks, names, sizes, group)
        cut = TensorParallelCut.of(parameter, group.size(), pieces=assignment.fusion.pieces)
        blockwise = options.tensor_parallel == "blockwise" and cut.dim is not None
        own = group.rank() if blockwise else None
        return distribution_of(parameter.shape, placements, cut, self._grids[key], own=own)


def make_muon(
    groups: Sequence[tuple[Algorithm, Group]],
    masters: Mapping[int, torch.Tensor],
    assigned: Mapping[int, Assignment],
    distributions: Mapping[int, Distribution],
    options: HyperMuonOptions,
    config: Any,
    *,
    stock_defaults: Mapping[str, Any],
    known_groups: Sequence[dist.ProcessGroup] = (),
    topology: Any = None,
) -> HyperMuon:
    """The optimizer of a rank. No communication before its first step.

    Args:
        groups: Of `split_groups`.
        masters: By `id` of a parameter, the tensor that is stepped.
        assigned: By `id` of a parameter.
        distributions: By `id` of a parameter of Muon.
        options: Ours.
        config: Megatron's `OptimizerConfig`.
        stock_defaults: What the groups have because stock's optimizer is torch's Adam; not part of Megatron's entries.
        known_groups: Process groups that may be used for exchanges.
        topology: Which ranks share a supernode, for counters.
    """
    splits: dict[torch.Tensor, Split] = {}
    where: dict[torch.Tensor, Distribution] = {}
    made, extras = [], []
    for algorithm, group in groups:
        largest, smallest = learning_rates(group, algorithm, options, lr=config.lr, min_lr=config.min_lr or 0.0)
        entry: Group = {
            "params": [masters[id(p)] for p in group["params"]],
            "param_names": [assigned[id(p)].name for p in group["params"]],
            "algorithm": algorithm,
            "lr": largest,
            "weight_decay": group.get("weight_decay", config.weight_decay),
        }
        if algorithm == "adamw":
            entry["betas"] = group.get("betas", (config.adam_beta1, config.adam_beta2))
            entry["eps"] = group.get("eps", config.adam_eps)
        else:
            for parameter in group["params"]:
                where[masters[id(parameter)]] = distributions[id(parameter)]
                split = assigned[id(parameter)].fusion.split
                if split is not None:
                    splits[masters[id(parameter)]] = split
        made.append(entry)
        of_megatron = {name: value for name, value in group.items() if name not in stock_defaults and name != "params"}
        extras.append({**of_megatron, "max_lr": largest, "min_lr": smallest})
    communicators = GroupCommunicators()
    communicators.know(known_groups)
    muon = HyperMuon(
        made,
        config.lr,
        momentum=options.momentum,
        nesterov=options.nesterov,
        splits=splits,
        distributions=where,
        wave_bytes=options.wave_bytes,
        communicators=communicators,
        topology=topology,
        scale=options.scale,
        extra_scale=options.extra_scale,
        coefficients=options.coefficients,
        steps=options.ns_steps,
        ns_dtype=_DTYPES[options.ns_dtype],
        exchange=options.exchange,
        momentum_placement=options.momentum_placement,
    )
    for group, extra in zip(muon.param_groups, extras, strict=True):
        group.update(extra)
    return muon
