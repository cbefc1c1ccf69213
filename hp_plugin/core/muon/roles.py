"""What a parameter is in its model: embedding, output head, norm, router, ... or a hidden matrix.

A parameter is judged by the modules that own it, all of them if it is tied. Class names are looked up in the whole
method resolution order, so a module whose class a wrapper has replaced (`fully_shard` makes `FSDPLinear` of `Linear`)
is still what it was. Host frameworks are recognised by class names and attributes; none is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hp_plugin.core.layout import attached_layout
from hp_plugin.errors import ConfigurationError

LANGUAGE_HEAD_NAMES = frozenset(
    {"lm_head", "output_layer", "embed_out", "output_head", "unembed", "unembedding", "to_logits", "head"}
)
"""Names of modules that turn hidden states into logits over a vocabulary."""

HEAD_NAMES = LANGUAGE_HEAD_NAMES | {"classifier", "classification_head", "score", "v_head", "value_head"}
"""Names of modules that are output heads. Others are found by their shape, or named by a pattern."""

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"})
_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM_CLASS = re.compile(r"Norm(\d[dD])?$")
_EMBEDDING_CLASS = re.compile(r"Embeddings?(Bag)?(\d[dD])?$")
_ROUTER_CLASS = re.compile(r"Router$|^(\w*MoE|TopK|\w*Moe)Gate$")
_MIXTURE_CLASS = re.compile(r"MoE|Moe|MOE|Mixture|Experts")
_EXPERTS_CLASS = re.compile(r"Experts$|Grouped(MLP|Experts)")
_BIAS_NAME = re.compile(r"(^|_)bias(_|\d|$)")
_INPUT_NAME = re.compile(r"embed|(^|_)(tokens?|wte|wpe)($|_)")


@dataclass(frozen=True, eq=False)
class Place:
    """One of the places at which a parameter stands in a model.

    Attributes:
        name: Of the parameter as `named_parameters` gives it.
        path: The same as a tuple, without the components that wrappers put in.
        module: Its owner.
        parent: The module that holds the owner, or None at the root.
    """

    name: str
    path: tuple[str, ...]
    module: nn.Module
    parent: nn.Module | None

    @property
    def own_name(self) -> str:
        """Of the parameter within its module: "weight"."""
        return self.path[-1]

    @property
    def module_name(self) -> str:
        """Of the owner within its parent: "q_proj"; "" at the root."""
        return self.path[-2] if len(self.path) > 1 else ""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a model with all places that it stands at, the first of `named_parameters` first."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """Its first name."""
        return self.places[0].name


def members(model: nn.Module) -> tuple[Member, ...]:
    """All parameters of a model, frozen ones included, each once, in the order of `named_parameters`."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            path = _unwrapped(name.split("."))
            parent = _parent(prefix.split(".") if prefix else [], modules)
            found.setdefault(id(parameter), (parameter, []))[1].append(Place(name, path, module, parent))
    return tuple(
        Member(parameter, _global_shape(parameter, places[0]), tuple(places)) for parameter, places in found.values()
    )


def adamw_reason(member: Member) -> str | None:
    """Why a parameter is not a hidden matrix; None if it is one.

    The output head that only its shape gives away is not found here, see `heads_by_shape`.
    """
    for rule in _RULES:
        for place in member.places:
            reason = rule(member, place)
            if reason is not None:
                return reason
    return None


def heads_by_shape(model: nn.Module, candidates: Sequence[Member], everyone: Sequence[Member]) -> list[Member]:
    """Linear layers of the shape of the largest embedding: (num_embeddings, embedding_dim).

    Args:
        model: The model.
        candidates: Members that no rule has given to AdamW.
        everyone: All members of the model.

    Returns:
        Those that may be the output head. None if the model has no embedding, if another module shares the embedding's
        weight, or if a module is called like a head (it may have no weight and use the embedding's, as in Megatron).
    """
    tables = [m for m in everyone if len(m.shape) == 2 and any(_embedding(m, place) for place in m.places)]
    if not tables or any(name.rpartition(".")[2] in LANGUAGE_HEAD_NAMES for name, _ in model.named_modules()):
        return []
    table = max(tables, key=lambda member: member.shape[0])
    if any(not _embedding(table, place) for place in table.places):
        return []
    return [m for m in candidates if m.shape == table.shape and any(_is_linear(place) for place in m.places)]


def holds_experts(place: Place) -> bool:
    """True if the owner, by its class or by a name on its path, stores the weights of several experts."""
    return "experts" in place.path[:-1] or _class_matches(place.module, _EXPERTS_CLASS)


def fuses_experts(place: Place) -> bool:
    """True if the owner stores several experts in each of its parameters (and not one in each)."""
    return _class_matches(place.module, _EXPERTS_CLASS) and not re.fullmatch(r"weight\d+", place.own_name)


def convolution_groups(member: Member) -> int | None:
    """Groups of the convolution whose kernel a parameter is; None if it is no such kernel."""
    for place in member.places:
        if isinstance(place.module, _ConvNd):
            return place.module.groups
    return 1 if len(member.shape) in (4, 5) else None


# ---------------------------------------------------------------------------------------------------------- rules


def _vector(member: Member, place: Place) -> str | None:
    return None if len(member.shape) >= 2 else "scalar" if not member.shape else "vector"


def _marked(member: Member, place: Place) -> str | None:
    if getattr(member.parameter, "use_muon", True) is False:
        return "marked use_muon=False"
    for mark in ("is_embedding_or_output_parameter", "shared_embedding"):
        if getattr(member.parameter, mark, False):
            return f"marked {mark}"
    return None


def _embedding(member: Member, place: Place) -> str | None:
    if isinstance(place.module, (nn.Embedding, nn.EmbeddingBag)) or _class_matches(place.module, _EMBEDDING_CLASS):
        return "embedding"
    return "embedding by name" if _INPUT_NAME.search(place.own_name) else None


def _head(member: Member, place: Place) -> str | None:
    return "output head by name" if place.module_name in HEAD_NAMES else None


def _norm(member: Member, place: Place) -> str | None:
    found = isinstance(place.module, _NORM_TYPES) or _class_matches(place.module, _NORM_CLASS)
    return "norm" if found else None


def _bias(member: Member, place: Place) -> str | None:
    return "bias" if _BIAS_NAME.search(place.own_name) else None


def _router(member: Member, place: Place) -> str | None:
    if _class_matches(place.module, _ROUTER_CLASS) or place.module_name == "router":
        return "router"
    # "gate" is also what some gated MLPs call a projection: it routes only where there is something to route to.
    if place.module_name not in ("gate", "gating", "shared_expert_gate") or place.parent is None:
        return None
    mixture = hasattr(place.parent, "experts") or _class_matches(place.parent, _MIXTURE_CLASS)
    return "router" if mixture else None


def _state_space(member: Member, place: Place) -> str | None:
    return "state-space decay" if place.own_name == "A_log" else None


def _transposed_convolution(member: Member, place: Place) -> str | None:
    return "transposed convolution" if isinstance(place.module, _ConvTransposeNd) else None


def _thin(member: Member, place: Place) -> str | None:
    if math.prod(member.shape) == 0:
        return "empty"
    if isinstance(place.module, _ConvNd) and place.module.groups > 1:
        return "grouped convolution"
    if len(member.shape) == 3 and not isinstance(place.module, _ConvNd):
        thin = min(member.shape[1:]) == 1
    else:
        thin = min(member.shape[0], math.prod(member.shape[1:])) == 1
    return "one row or column" if thin else None


_RULES: tuple[Callable[[Member, Place], str | None], ...] = (
    _embedding,
    _head,
    _marked,
    _norm,
    _bias,
    _vector,
    _router,
    _state_space,
    _transposed_convolution,
    _thin,
)


# ---------------------------------------------------------------------------------------------------------- names


def _unwrapped(path: Iterable[str]) -> tuple[str, ...]:
    return tuple(component for component in path if component not in _WRAPPERS)


def _parent(prefix: list[str], modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module above the one at `prefix`, wrappers around that one skipped."""
    while prefix and prefix[-1] in _WRAPPERS:
        prefix = prefix[:-1]
    return modules[".".join(prefix[:-1])] if prefix else None


def _class_names(module: nn.Module) -> Iterator[str]:
    return (cls.__name__ for cls in type(module).__mro__ if cls is not object)


def _class_matches(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for name in _class_names(module))


def _is_linear(place: Place) -> bool:
    return isinstance(place.module, nn.Linear) or any("Linear" in name for name in _class_names(place.module))


def _global_shape(parameter: nn.Parameter, place: Place) -> tuple[int, ...]:
    """Of the whole parameter, also where a sharding plan or DeepSpeed ZeRO-3 (`ds_shape`) has cut it."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigurationError(f"parameter {place.name} has no shape yet; run a forward before routing it.")
    attached = attached_layout(parameter)
    if attached is not None:
        return attached.layout.global_shape
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    flat = getattr(parameter, "_is_flat_param", False) or type(parameter).__name__ == "FlatParameter"
    matrix = isinstance(place.module, (nn.Linear, nn.Embedding)) and place.own_name == "weight"
    if flat or (matrix and len(shape) == 1):
        raise ConfigurationError(
            f"parameter {place.name} has the shape {shape}: it is a flattened shard, as FSDP1 and partitioning "
            "optimizers keep, and its matrix cannot be known from it. Shard with fully_shard, whose parameters are "
            "DTensors, or route the model before it is wrapped."
        )
    return shape
