"""Full values of sharded parameters, their optimizer state and gradients, for code that knows ZeRO-3's helpers."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.transport import announce_update
from hp_plugin.deepspeed.replacements import shard_of
from hp_plugin.errors import ConfigurationError

_MARK = "_hyperfsdp_engine"
_FULL = "_hyperfsdp_full"


class EngineReference:
    """Weak reference to the engine of a parameter. A copy or pickle of the parameter refers to none."""

    def __init__(self, engine: Any = None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __reduce__(self) -> Any:
        return (EngineReference, ())

    @property
    def engine(self) -> Any:
        """The engine; None where it is gone."""
        return None if self._engine is None else self._engine()


class GatheredTensor(DTensor):
    """A sharded parameter inside `deepspeed.zero.GatheredParameters`: for every operation, its full and plain value.

    The class of the parameter object is changed and changed back, so that each reference which a caller holds sees the
    full value. Its own shard stays where it is.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation, attribute access included, acts on the full value."""
        args, kwargs = tree_map(_full_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_full_of(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _full_of(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # its own has no name there
        return repr(_full_of(self))


def show_full(parameter: torch.Tensor) -> None:
    """From now on `parameter` is its full value. Every rank of its shard group must call."""
    full = torch.nn.Parameter(full_value(parameter), requires_grad=parameter.requires_grad)
    vars(parameter)[_FULL] = full
    parameter.__class__ = GatheredTensor


def show_shard(parameter: torch.Tensor) -> torch.Tensor:
    """`parameter` is its shard again; returns the full value as it is by now."""
    parameter.__class__ = DTensor
    full: torch.Tensor = vars(parameter).pop(_FULL)
    return full.detach()


def is_shown_full(parameter: torch.Tensor) -> bool:
    """Whether :func:`show_full` is in effect."""
    return type(parameter) is GatheredTensor


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _full_of(value: Any) -> Any:
    return vars(value)[_FULL] if type(value) is GatheredTensor else value


def mark_parameters(engine: Any) -> None:
    """Lets :func:`is_ours` recognise the parameters of an engine."""
    reference = EngineReference(engine)
    for parameter in engine.module.parameters():
        setattr(parameter, _MARK, reference)


def is_ours(parameter: Any) -> bool:
    """Whether `parameter` rests as a shard of a HyperFSDP engine."""
    return isinstance(parameter, DTensor) and hasattr(parameter, _MARK)


def engine_of(parameter: torch.Tensor) -> Any:
    """The engine that steps `parameter`."""
    engine = getattr(parameter, _MARK).engine
    if engine is None:
        raise ConfigurationError("the engine of this parameter no longer exists; keep a reference to it.")
    return engine


@torch.no_grad()
def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, plain, in memory of its own. Every rank of its shard group must call."""
    if isinstance(tensor, GatheredTensor):
        return _full_of(tensor).detach().clone()
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor().detach()
    return full.clone() if _share_memory(full, local_tensor(tensor)) else full  # a shard group of one rank


@torch.no_grad()
def write_full(target: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of a full `value`, equal on all ranks, into a sharded tensor. No communication."""
    value = full_value(value)
    if value.shape != target.shape:
        raise ConfigurationError(
            f"a value of shape {tuple(value.shape)} was given for a tensor of shape {tuple(target.shape)}; give the "
            "full value, not a partition."
        )
    if isinstance(target, GatheredTensor):
        _full_of(target).copy_(value)
        return
    announce_update([target])
    local_tensor(target).copy_(shard_of(value, target) if isinstance(target, DTensor) else value)


@torch.no_grad()
def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, flattened, in memory of its own. No communication."""
    return local_tensor(tensor).detach().reshape(-1).clone()


@torch.no_grad()
def write_local(target: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of a sharded tensor; `value` has as many elements, in any shape.

    Every rank of the shard group must call, for a parameter whose shards others read in place.
    """
    if is_shown_full(target):
        raise ConfigurationError(
            "this parameter is gathered, so what is written to its part would be lost; write to the full value, or "
            "after GatheredParameters."
        )
    local = local_tensor(target)
    if value.numel() != local.numel():
        raise ConfigurationError(
            f"{value.numel()} elements were given for the {local.numel()} that this rank holds of a tensor of shape "
            f"{tuple(target.shape)}; safe_get_local_* gives as many as safe_set_local_* takes."
        )
    announce_update([target])
    local.copy_(value.reshape(local.shape))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of all micro-batches so far, a shard; None where there is none. Every rank must call."""
    engine_of(parameter).complete_gradients()
    return parameter.grad


def state_of(parameter: torch.Tensor, key: str) -> torch.Tensor | None:
    """The optimizer's state `key` of a parameter, sharded as it; None where there is none yet."""
    optimizer = engine_of(parameter).basic_optimizer
    found = optimizer.state.get(parameter, {}).get(key)
    return found if isinstance(found, torch.Tensor) else None
