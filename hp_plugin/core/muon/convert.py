"""Carries optimizer state between Muon implementations, and between Muon and Adam, tensor by tensor.

Muon's momentum comes in two conventions with the same direction: the running mean `m = mu m + (1 - mu) g` ("ema") and
the running sum `M = mu M + g` ("heavy_ball"), M = m / (1 - mu). Adam's `exp_avg` is a running mean too. So a buffer is
moved by multiplying it with one number; which keys hold it, and by which convention, is the table `ORIGINS`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from hp_plugin.core.muon.state_dicts import StateDict, named_keys, nested, placed
from hp_plugin.errors import ConfigurationError, UnsupportedError

Algorithm = Literal["muon", "adamw"]
Convention = Literal["ema", "heavy_ball"]
FromAdam = Literal["exp_avg", "fresh"]
ToAdam = Literal["constant_gradient", "fresh"]


@dataclass(frozen=True)
class Origin:
    """How an optimizer keeps its state.

    Attributes:
        momentum_key: State key of Muon's momentum; None if it is no Muon.
        convention: Of that momentum, where its parameter group has no "momentum_kind", as `HyperMuon`'s have.
        coefficient_key: Option of the parameter group that is mu.
        adam_keys: State keys of exp_avg, exp_avg_sq and step of the parameters that Adam trains.
        step_in_group: The step is an option of the parameter group instead.
    """

    momentum_key: str | None
    convention: Convention = "ema"
    coefficient_key: str = "momentum"
    adam_keys: tuple[str, str, str] = ("exp_avg", "exp_avg_sq", "step")
    step_in_group: bool = False


ORIGINS: Mapping[str, Origin] = MappingProxyType(
    {
        "hypermuon": Origin("momentum_buffer"),
        "adamw": Origin(None),
        # torch 2.13 torch/optim/_muon.py; torch 2.9 introduced it.
        "torch": Origin("momentum_buffer"),
        # Emerging-Optimizers fd77292, OrthogonalizedOptimizer; Megatron's Muon derives from it.
        "emerging_optimizers": Origin("momentum_buffer"),
        "megatron": Origin("momentum_buffer"),
        # DeepSpeed edaa722, runtime/zero/muon. ZeRO keeps the buffer flat: see `unflatten`.
        "deepspeed": Origin("momentum_buffer"),
        # KellerJordan/Muon 857d1ad.
        "keller": Origin("momentum_buffer"),
        # microsoft/dion 0a059a4: the sum, under another name; AdamW in the same optimizer has its own names.
        "dion": Origin("momentum", "heavy_ball", "mu", ("momentum", "variance", "step"), step_in_group=True),
        # The same repository's MuonReference.
        "dion_reference": Origin("momentum_buffer", "heavy_ball"),
        # Any other implementation that keeps the running sum as "momentum_buffer".
        "heavy_ball": Origin("momentum_buffer", "heavy_ball"),
    }
)
"""By name: the optimizers whose state can be read."""


@dataclass(frozen=True)
class Source:
    """A state dict to read.

    Attributes:
        origin: A key of `ORIGINS`.
        state_dict: As `Optimizer.state_dict()` gives it, keyed by index, or by parameter name as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` does, nested or flattened.
        names: Parameter names in the order of its indices. None: the state dict has them, as keys or as "param_names".
        momentum: mu. None: the state dict's parameter groups have it. Needed where conventions differ.
    """

    origin: str
    state_dict: StateDict
    names: Sequence[str] | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise UnsupportedError(
                f"the state of {self.origin!r} cannot be read; known are {', '.join(ORIGINS)}. If its momentum is a "
                'running mean called "momentum_buffer" use "torch", if it is a running sum "heavy_ball".'
            )


@dataclass(frozen=True)
class Conversion:
    """What became of one parameter's state.

    Attributes:
        name: Of the parameter.
        algorithm: That trains it now.
        taken: Where its state is from: "momentum_buffer", "exp_avg", "fresh", ...
        factor: What the momentum was multiplied by.
    """

    name: str
    algorithm: Algorithm
    taken: str
    factor: float = 1.0


@dataclass(frozen=True)
class Imported:
    """The result of `import_state`.

    Attributes:
        state_dict: The target's, with new state: for `load_state_dict`, or `set_optimizer_state_dict` if keyed by name.
        conversions: One per parameter of the target.
        unused: Parameters of the sources that the target does not have.
    """

    state_dict: dict[str, Any]
    conversions: tuple[Conversion, ...]
    unused: tuple[str, ...]

    def summary(self) -> str:
        """What was taken for how many parameters, one line each."""
        counts: dict[str, int] = {}
        for item in self.conversions:
            times = "" if item.factor == 1.0 else f" times {item.factor:g}"
            key = f"{item.algorithm} from {item.taken}{times}"
            counts[key] = counts.get(key, 0) + 1
        lines = [f"{count} parameters: {key}" for key, count in counts.items()]
        return "\n".join([*lines, f"not used: {', '.join(self.unused)}"] if self.unused else lines)


@torch.no_grad()
def import_state(
    target: StateDict,
    sources: Source | Sequence[Source],
    *,
    names: Sequence[str] | None = None,
    from_adam: FromAdam = "exp_avg",
    to_adam: ToAdam = "fresh",
    missing: Literal["error", "fresh"] = "error",
) -> Imported:
    """Fills a state dict of the new optimizer with the state of old ones.

    Local: every rank converts what it has. A `DTensor` must be placed as in the target; a whole plain tensor is cut to
    the target's placement. Sources are not changed. Momentum and moments become fp32.

    Args:
        target: State dict of the optimizer that goes on: `HyperMuon`, or AdamW on the way back. Its groups tell what
            trains a parameter: their "algorithm", else AdamW if they have "betas" and Muon if not. The convention of
            the momentum is their "momentum_kind", else the running mean.
        sources: One or several, as with `torch.optim.Muon` beside an AdamW.
        names: Parameter names in the order of the target's indices, if it has none.
        from_adam: For parameters that go from Adam to Muon. "exp_avg": Adam's first moment, which is a running mean
            like the momentum. "fresh": zeros.
        to_adam: For parameters that go from Muon to AdamW, whose second moment nobody knows. "fresh": zeros and step
            0, as if training began. "constant_gradient": the state that AdamW has after 1 / (1 - beta1) steps in which
            the gradient was the momentum: the direction is kept, and the second moment adapts within as many steps.
            (A kept first moment over a second moment of zeros would make steps of any size.)
        missing: Parameters that no source has: refuse, or start fresh.

    Raises:
        ConfigurationError: Names, shapes, placements or keys do not fit, or mu is needed and not known.
        UnsupportedError: A flat ZeRO buffer; see `unflatten`.
    """
    found = _by_name([sources] if isinstance(sources, Source) else sources)
    keys = named_keys(target, names)
    template: Mapping[Hashable, Any] = target["state"]
    state: dict[Hashable, Any] = {}
    conversions = []
    for key, (name, group) in keys.items():
        old = found.get(name)
        if old is None and missing == "error":
            raise ConfigurationError(
                f"no source has state for {name}; they have {_some(found)}. Give the sources' names in the order of "
                'their indices, or start such parameters fresh (missing="fresh").'
            )
        values, conversion = _converted(name, group, old, from_adam, to_adam)
        conversions.append(conversion)
        own = template.get(key, {})
        state[key] = {k: placed(name, k, v, own.get(k)) for k, v in (values or _zeros(own)).items()}
    unused = tuple(name for name in found if name not in {name for name, _ in keys.values()})
    return Imported({**target, "state": state}, tuple(conversions), unused)


def unflatten(buffer: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Cuts a flat buffer into tensors.

    Args:
        buffer: 1-D. DeepSpeed ZeRO-1 and 2 keep as "momentum_buffer" of each partition the momenta of all matrices that
            the partition touches, whole, one after the other. (Stage 3 keeps pieces of matrices: gather them first.)
        shapes: By parameter name, in the order in which the buffer has them.

    Returns:
        Views of the buffer, by name.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    if buffer.dim() != 1 or buffer.numel() != sum(sizes):
        raise ConfigurationError(
            f"a buffer of shape {tuple(buffer.shape)} does not hold tensors of together {sum(sizes)} elements: "
            f"{dict(shapes)}."
        )
    parts = buffer.split(sizes)
    return {name: part.view(tuple(shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


# --------------------------------------------------------------------------------------------------------- conversion


@dataclass(frozen=True)
class _Old:
    """One parameter's state as a source has it."""

    source: Source
    group: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def origin(self) -> Origin:
        return ORIGINS[self.source.origin]

    def is_muon(self) -> bool:
        key = self.origin.momentum_key
        return key is not None and key in self.state and self.origin.adam_keys[1] not in self.state


Values = dict[str, Any]


def _converted(
    name: str,
    group: Mapping[str, Any],
    old: _Old | None,
    from_adam: FromAdam,
    to_adam: ToAdam,
) -> tuple[Values, Conversion]:
    """The new state of one parameter; empty if it starts fresh."""
    algorithm = _algorithm(name, group)
    convention: Convention = group.get("momentum_kind", "ema") if algorithm == "muon" else "ema"
    if old is None or not old.state:
        return {}, Conversion(name, algorithm, "fresh")
    trained_by = old.group.get("algorithm", "muon")
    if trained_by not in ("muon", "adamw"):
        raise UnsupportedError(f"{name} was trained by {trained_by!r}; state of muon and adamw can be converted.")
    if old.is_muon():
        momentum, factor = _momentum(name, old, group, convention)
        if algorithm == "muon":
            taken = str(old.origin.momentum_key)
            return {"momentum_buffer": momentum * factor}, Conversion(name, algorithm, taken, factor)
        if to_adam == "fresh":
            return {}, Conversion(name, algorithm, "fresh")
        values = _after_constant_gradient(momentum * factor, group["betas"])
        return values, Conversion(name, algorithm, "momentum as constant gradient", factor)
    moments = _moments(name, old)
    if algorithm == "adamw":
        return moments, Conversion(name, algorithm, "exp_avg, exp_avg_sq and step")
    if from_adam == "fresh":
        return {}, Conversion(name, algorithm, "fresh")
    factor = 1.0 if convention == "ema" else 1.0 / (1.0 - _coefficient(name, group, "momentum", "the target"))
    return {"momentum_buffer": moments["exp_avg"] * factor}, Conversion(name, algorithm, "exp_avg", factor)


def _zeros(own: Mapping[str, Any]) -> Values:
    """Fresh state in the form of the target's own. Where it has none yet, its optimizer makes it."""
    return {key: torch.zeros_like(value) for key, value in own.items() if isinstance(value, torch.Tensor)}


def _momentum(name: str, old: _Old, group: Mapping[str, Any], convention: Convention) -> tuple[torch.Tensor, float]:
    """Muon's old momentum in fp32, and what makes it one of `convention`."""
    momentum = _tensor(name, str(old.origin.momentum_key), old.state)
    factor = 1.0
    if old.group.get("momentum_kind", old.origin.convention) == "heavy_ball":
        mu = old.source.momentum
        factor *= 1.0 - (_coefficient(name, old.group, old.origin.coefficient_key, "its source") if mu is None else mu)
    if convention == "heavy_ball":
        factor /= 1.0 - _coefficient(name, group, "momentum", "the target")
    return momentum, factor


def _moments(name: str, old: _Old) -> Values:
    """Adam's old state under torch's names, in fp32."""
    first, second, step = old.origin.adam_keys
    count = old.group.get(step) if old.origin.step_in_group else old.state.get(step)
    if count is None:
        raise ConfigurationError(f"the state of {name} has no {step!r}, only {sorted(map(str, old.state))}.")
    return {
        "step": torch.as_tensor(count, dtype=torch.float32).detach().clone(),
        "exp_avg": _tensor(name, first, old.state),
        "exp_avg_sq": _tensor(name, second, old.state),
    }


def _after_constant_gradient(gradient: torch.Tensor, betas: tuple[float, float]) -> Values:
    """AdamW's state after a few steps in which the gradient was always this one."""
    step = max(1, round(1.0 / (1.0 - betas[0])))
    return {
        "step": torch.tensor(float(step)),
        "exp_avg": gradient * (1.0 - betas[0] ** step),
        "exp_avg_sq": gradient * gradient * (1.0 - betas[1] ** step),
    }


def _algorithm(name: str, group: Mapping[str, Any]) -> Algorithm:
    found = group.get("algorithm", "adamw" if "betas" in group else "muon")
    if found not in ("muon", "adamw"):
        raise UnsupportedError(f"{name} is trained by {found!r}; state is converted for muon and adamw only.")
    return found


def _coefficient(name: str, group: Mapping[str, Any], key: str, whose: str) -> float:
    if key not in group:
        raise ConfigurationError(
            f"the momentum of {name} changes convention, but the parameter group of {whose} has no {key!r}, only "
            f"{sorted(map(str, group))}. Give momentum=... of the source."
        )
    value = float(group[key])
    if not 0.0 <= value < 1.0:
        raise ConfigurationError(f"the momentum coefficient of {name} is {value}, but must be from 0 to below 1.")
    return value


def _tensor(name: str, key: str, state: Mapping[str, Any]) -> torch.Tensor:
    value = state.get(key)
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(
            f"the state of {name} has no tensor {key!r}, only {sorted(map(str, state))}. Is the origin right? Known "
            f"are {', '.join(ORIGINS)}."
        )
    return value.detach().to(torch.float32, copy=True)


def _by_name(sources: Sequence[Source]) -> dict[str, _Old]:
    found: dict[str, _Old] = {}
    for source in sources:
        own = nested(source.state_dict)
        for key, (name, group) in named_keys(own, source.names).items():
            if name in found:
                raise ConfigurationError(f"two sources have state for {name}.")
            found[name] = _Old(source, group, own["state"].get(key, {}))
    return found


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "") if names else "none"
