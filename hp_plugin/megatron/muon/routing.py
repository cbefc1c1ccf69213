"""Which parameters of a Megatron model Muon trains, and how their fused weights are cut into matrices.

The decision is that of `hp_plugin.core.muon.routing` on each model chunk; Megatron marks embeddings and output layers.
How a weight is fused is known from the module that owns it: attention by query group, latent attention, gate and up.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.fused import gate_up, mla_kv_down, mla_kv_up, mla_q_up, mla_qkv_down, qkv_interleaved
from hp_plugin.core.muon.roles import members
from hp_plugin.core.muon.routing import Algorithm, Routing, Row, route
from hp_plugin.core.muon.splits import PerHead, nested
from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.arguments.muon_flags import HyperMuonOptions, flag_of


@dataclass(frozen=True)
class Fusion:
    """How a weight is fused.

    Attributes:
        split: Of the matrix that is orthogonalized; None: it is one matrix.
        pieces: Into how many pieces tensor parallelism cuts the weight, each by itself; None: as the weight is marked.
    """

    split: Split | None = None
    pieces: int | None = None


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who trains a parameter.

    Attributes:
        name: In its model chunk; behind the number of the chunk if there are several.
        algorithm: "muon" or "adamw".
        fusion: How it is cut; of Muon's parameters.
        is_expert: Whether expert tensor parallelism cuts it.
    """

    name: str
    algorithm: Algorithm
    fusion: Fusion
    is_expert: bool


def assign(
    models: Sequence[nn.Module], options: HyperMuonOptions, *, tp_size: int, group: dist.ProcessGroup | None
) -> tuple[dict[int, Assignment], Routing]:
    """Decide for every trained parameter of this rank. Every rank of `group` must call.

    Args:
        models: The model chunks of this rank inside all wrappers.
        options: Patterns and splits.
        tp_size: Tensor-parallel ranks, one for each part if parts are orthogonalized by themselves.
        group: The ranks that hold other parts of the model, on which a pattern may match; None for one rank.

    Returns:
        By `id` of the parameter, and the decision as a table.

    Raises:
        ConfigurationError: A pattern matches nothing on any rank, or no rank has a parameter for Muon.
    """
    include, exclude = _patterns(options.include), _patterns(options.exclude)
    _check_matches(include + exclude, {name for model in models for name in _names(model)}, group)
    assigned: dict[int, Assignment] = {}
    rows: list[Row] = []
    parameters: list[nn.Parameter] = []
    frozen: list[str] = []
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        routing = route(
            model,
            muon=_matching(include, model) or None,
            adamw=_matching(exclude, model) or None,
            marked=True,
            require_muon=False,
        )
        fusions = dict(fused(model, options, tp_size))
        for row, parameter in zip(routing.rows, routing.parameters):
            fusion = fusions.get(id(parameter), Fusion(row.split)) if row.algorithm == "muon" else Fusion()
            rows.append(replace(row, name=prefix + row.name, split=fusion.split))
            assigned[id(parameter)] = Assignment(prefix + row.name, row.algorithm, fusion, is_expert(row.name))
        parameters += routing.parameters
        frozen += routing.frozen
    if not _anywhere([any(row.algorithm == "muon" for row in rows)], group)[0]:
        raise ConfigurationError(
            f"no parameter of the model goes to Muon; name some with {flag_of('include')}, or remove --use-hypermuon."
        )
    return assigned, Routing(tuple(rows), tuple(parameters), tuple(frozen))


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, by the rule of Megatron's own optimizers."""
    return "experts" in name and "shared" not in name


def fused(model: nn.Module, options: HyperMuonOptions, tp_size: int) -> Iterator[tuple[int, Fusion]]:
    """The fused weights of a model chunk, by `id`.

    Args:
        model: Of Megatron; modules are known by the names of their layers.
        options: What is to be cut.
        tp_size: As in :func:`assign`.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is None:
            continue
        for layer, split in _attention(module, config, options, tp_size):
            weight = getattr(getattr(module, layer, None), "weight", None)
            if isinstance(weight, torch.Tensor):
                yield id(weight), Fusion(split)
        if getattr(config, "gated_linear_unit", False) and hasattr(module, "linear_fc1"):
            fc1: Any = module.linear_fc1
            for name, weight in fc1.named_parameters(recurse=False):
                # Where gate and up alternate every few rows they are one matrix: the order of rows does not matter.
                if weight.dim() == 2 and name.startswith("weight") and not _alternates(config):
                    yield id(weight), Fusion(gate_up() if options.split_gate_up else None, pieces=2)


def _attention(
    module: nn.Module, config: Any, options: HyperMuonOptions, tp_size: int
) -> Iterator[tuple[str, Split | None]]:
    """Layers of an attention module that are fused."""
    parts = 1 if options.tensor_parallel == "whole" else tp_size
    cut_rows = options.split_qkv or options.split_heads
    if hasattr(module, "linear_qkv") and getattr(config, "num_query_groups", None):
        yield "linear_qkv", _qkv(config, parts, per_head=options.split_heads) if cut_rows else None
    if not cut_rows or not getattr(config, "kv_lora_rank", None):
        return
    heads = _shared(config.num_attention_heads, parts, "attention heads")
    nope, rope, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    queries: Split = mla_q_up(heads, nope, rope)
    keys: Split = mla_kv_up(heads, nope, value)
    if options.split_heads:
        each = PerHead(heads)
        queries, keys = nested(queries, q_nope=each, q_rope=each), nested(keys, k_nope=each, v=each)
    yield "linear_q_proj", queries
    yield "linear_q_up_proj", queries
    yield "linear_kv_up_proj", keys
    if parts == 1:
        # The down projections have no heads; a part of them is a matrix of its own.
        yield "linear_kv_down_proj", mla_kv_down(config.kv_lora_rank, rope)
        if hasattr(module, "linear_qkv_down_proj"):
            weight = getattr(module.linear_qkv_down_proj, "weight", None)
            ranks = tp_size if getattr(weight, "tensor_model_parallel", False) else 1
            yield (
                "linear_qkv_down_proj",
                mla_qkv_down(config.q_lora_rank, config.kv_lora_rank, rope, tensor_parallel=ranks),
            )


def _qkv(config: Any, parts: int, *, per_head: bool) -> Split:
    groups = _shared(config.num_query_groups, parts, "query groups")
    per_group = config.num_attention_heads // config.num_query_groups
    gated = bool(getattr(config, "attention_output_gate", False))
    split = qkv_interleaved(groups, per_group, config.kv_channels, gated=gated)
    if not per_head:
        return split
    queries, keys = PerHead(groups * per_group), PerHead(groups)
    gate = {"gate": queries} if gated else {}
    return nested(split, q=queries, k=keys, v=keys, **gate)


def _shared(count: int, parts: int, what: str) -> int:
    if count % parts:
        raise ConfigurationError(
            f"{flag_of('tensor_parallel')} blockwise cannot cut the model's {count} {what} over {parts} ranks; use "
            f"whole, or {flag_of('split_qkv')} false."
        )
    return count // parts


def _alternates(config: Any) -> bool:
    sizes = (getattr(config, f"moe_{kind}_glu_interleave_size", None) for kind in ("mlp", "shared_expert"))
    return any(size is not None for size in sizes)


# ---------------------------------------------------------------------------------------------------------- patterns


def _patterns(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _names(model: nn.Module) -> list[str]:
    """Of the trained parameters, tied ones with all their names."""
    return [place.name for member in members(model) if member.parameter.requires_grad for place in member.places]


def _matching(patterns: Sequence[str], model: nn.Module) -> list[str]:
    names = _names(model)
    return [pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)]


def _check_matches(patterns: Sequence[str], names: set[str], group: dist.ProcessGroup | None) -> None:
    found = _anywhere([any(fnmatch.fnmatchcase(name, pattern) for name in names) for pattern in patterns], group)
    lost = [pattern for pattern, matches in zip(patterns, found) if not matches]
    if lost:
        raise ConfigurationError(
            f"the pattern {lost[0]!r} of {flag_of('include')} or {flag_of('exclude')} matches no parameter on any "
            f"pipeline stage. Names are like {', '.join(sorted(names)[:4])}."
        )


def _anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Each flag, or-ed over the ranks of a group."""
    if group is None or group.size() == 1 or not flags:
        return list(flags)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, list(flags), group=group)
    return [any(column) for column in zip(*everyone)]
