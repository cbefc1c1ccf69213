"""Options of `HyperMuon`, as values that a state dict can hold, checked where they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

import torch

from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.momentum import MomentumKind
from hp_plugin.core.muon.newton_schulz import NewtonSchulz
from hp_plugin.core.muon.plan import Exchange
from hp_plugin.core.muon.scale import scale_formula
from hp_plugin.errors import ConfigurationError, UnsupportedError

Kernel = Literal["auto", "loop", "batched", "gram"]
MomentumPlacement = Literal["replicated", "owner"]


@dataclass(frozen=True)
class MuonOptions:
    """What of Muon is seldom changed.

    Attributes:
        scale: Formula by which an update is scaled, see `hp_plugin.core.muon.scale`.
        extra_scale: A further factor of every update.
        coefficients: Name of a coefficient set, or its numbers, see `hp_plugin.core.muon.coefficients`.
        steps: Newton-Schulz steps; None is what the set has.
        eps: Smallest norm by which a matrix is divided.
        ns_dtype: Dtype of the iteration, in which matrices also travel.
        kernel: How the iteration is computed.
        exact: Whether the sequence of operations is that of torch.optim.Muon, whatever it costs.
        exchange: How matrices reach their owners: "a2a" needs the fewest bytes; "gather" suits back ends without
            all-to-all and groups too large for it; "auto" chooses.
        momentum_kind: Convention of the momentum buffer.
        momentum_dtype: Dtype of the momentum buffer.
        momentum_placement: Where replicas keep the momentum of a parameter: "replicated", on all of them; "owner", on
            the replica that orthogonalizes it. `state_dict` then is a collective, and gives it on all.
        gradients: Where replicas need the gradient of a parameter: "replicated", on all of them; "owner", on the one
            that orthogonalizes it, where `hp_plugin.fully_shard` then sums it: half the bytes between replicas. `.grad`
            is None on the others. Needs momentum_placement="owner".
    """

    scale: str = "clamped_aspect"
    extra_scale: float = 1.0
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "classic"
    steps: int | None = None
    eps: float = 1e-7
    ns_dtype: torch.dtype = torch.bfloat16
    kernel: Kernel = "auto"
    exact: bool = False
    exchange: Exchange = "auto"
    momentum_kind: MomentumKind = "ema"
    momentum_dtype: torch.dtype = torch.float32
    momentum_placement: MomentumPlacement = "replicated"
    gradients: MomentumPlacement = "replicated"

    def as_group(self) -> dict[str, Any]:
        """The options as entries of a parameter group."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def muon_options(given: Mapping[str, Any]) -> MuonOptions:
    """Options by name. Raises ConfigurationError for a name that is unknown."""
    names = [field.name for field in fields(MuonOptions)]
    for name in given:
        if name not in names:
            raise ConfigurationError(f"HyperMuon has no option {name!r}; beside its arguments it has {names}")
    return MuonOptions(**given)


_MUON = frozenset(("lr", "momentum", "nesterov", "weight_decay", *(field.name for field in fields(MuonOptions))))
_ADAMW = frozenset(("lr", "betas", "eps", "weight_decay", "foreach", "fused"))
_OF_TORCH = frozenset(("params", "param_names", "algorithm", "initial_lr"))
_CHOICES = {
    "exchange": get_args(Exchange),
    "kernel": get_args(Kernel),
    "momentum_kind": get_args(MomentumKind),
    "momentum_placement": get_args(MomentumPlacement),
    "gradients": get_args(MomentumPlacement),
}


def adamw_options(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """The options of a group of the AdamW part."""
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": None, "fused": None}


def complete_group(group: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter group with all options of its algorithm.

    Args:
        group: As the user gave it.
        defaults: Of each algorithm, all options.

    Raises:
        ConfigurationError: An unknown algorithm or option, or a value out of range.
    """
    algorithm = group.get("algorithm", "muon")
    if algorithm not in defaults:
        raise ConfigurationError(f"a parameter group has the algorithm {algorithm!r}; choose muon or adamw")
    known = _MUON if algorithm == "muon" else _ADAMW
    unknown = sorted(set(group) - known - _OF_TORCH)
    if unknown:
        raise ConfigurationError(
            f"a parameter group of {algorithm} has the unknown option {unknown[0]!r}; the options are {sorted(known)}"
        )
    complete = {**defaults[algorithm], **group, "algorithm": algorithm}
    _check_numbers(complete)
    if algorithm == "muon":
        _check_muon(complete)
    return complete


def shared_options(group: Mapping[str, Any]) -> str:
    """The options of a group that ranks must agree on, as text: all but the learning rate, which is set every step."""
    return repr([(name, group[name]) for name in sorted(_MUON - {"lr"})])


def newton_schulz_of(group: Mapping[str, Any]) -> NewtonSchulz:
    """How the matrices of a group are orthogonalized."""
    return NewtonSchulz(
        resolve_coefficients(group["coefficients"], group["steps"]),
        eps=group["eps"],
        dtype=group["ns_dtype"],
        kernel=group["kernel"],
        exact=group["exact"],
    )


def _check_numbers(group: Mapping[str, Any]) -> None:
    if isinstance(group["lr"], torch.Tensor):
        raise UnsupportedError("HyperMuon needs lr as a number, but got a tensor; pass float(lr).")
    for name in ("lr", "eps", "weight_decay", "extra_scale"):
        value = group.get(name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigurationError(f"{name} is {value}, but must be a number and not negative.")
    for name in ("momentum", *("betas",) * ("betas" in group)):
        for value in group[name] if name == "betas" else [group.get(name, 0.0)]:
            if not 0 <= value < 1:
                raise ConfigurationError(f"{name} has the value {value}, but must be at least 0 and below 1.")


def _check_muon(group: Mapping[str, Any]) -> None:
    scale_formula(group["scale"])
    newton_schulz_of(group)
    for name, choices in _CHOICES.items():
        if group[name] not in choices:
            raise ConfigurationError(f"{name} is {group[name]!r}; choose one of {', '.join(map(repr, choices))}")
    if group["gradients"] == "owner" and group["momentum_placement"] != "owner":
        raise ConfigurationError(
            'gradients="owner" leaves other replicas without the gradient, so they cannot keep the momentum: it needs '
            'momentum_placement="owner"'
        )
    dtype = cast("torch.dtype", group["momentum_dtype"])
    if not dtype.is_floating_point:
        raise ConfigurationError(f"momentum_dtype is {dtype}, but must be a floating dtype")
