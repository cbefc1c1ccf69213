"""fp32 weights and optimizer state: from the job's shards to the model of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.muon import HyperMuon
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.validation.pieces import Whole, by_piece, gathered, parameters_of, pieces


@dataclass
class State:
    """An optimizer's state by the names of a checkpoint.

    Attributes:
        tensors: What is laid out like parameters: name of the state -> whole tensors.
        steps: Global key -> how many steps its parameter has had.
    """

    tensors: dict[str, Whole] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A parameter, the fp32 tensor that the torch optimizer updates for it, and that optimizer."""

    parameter: torch.nn.Parameter
    master: torch.Tensor
    optimizer: torch.optim.Optimizer


def trained(optimizer: Any) -> Iterator[Trained]:
    """What a `MegatronOptimizer` updates, ours or stock's, chained or not.

    Raises:
        UnsupportedError: An optimizer that is neither.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is None:
            continue
        if hasattr(part, "masters"):
            pairs = zip(part.parameters, part.masters)
        elif hasattr(part, "fp32_from_float16_groups"):
            models = [p for group in part.float16_groups for p in group]
            masters = [p for group in part.fp32_from_float16_groups for p in group]
            own = [p for group in part.fp32_from_fp32_groups for p in group]
            pairs = zip([*models, *own], [*masters, *own])
        elif type(part).__name__.endswith("FP32Optimizer"):
            own = [p for group in inner.param_groups for p in group["params"]]
            pairs = zip(own, own)
        else:
            raise UnsupportedError(
                f"the optimizer {type(part).__name__} cannot be compared in --hyperfsdp-mode validation; use "
                "--optimizer adam or sgd, or --use-hypermuon."
            )
        for parameter, master in pairs:
            yield Trained(parameter, master, inner)


def masters(optimizer: Any) -> dict[int, torch.Tensor]:
    """The fp32 weights that are trained, local parts, by `id` of the parameter."""
    return {id(each.parameter): local_tensor(each.master) for each in trained(optimizer)}


@torch.no_grad()
def gathered_state(chunks: Sequence[Any], optimizer: Any) -> State:
    """The state of the job's optimizer, whole, on every rank. Every rank must call."""
    by_parameter = {id(each.parameter): each for each in trained(optimizer)}
    found: dict[str, list[Any]] = {}
    steps: dict[str, float] = {}
    with _whole_momentum(by_parameter.values()):
        for parameter, source in parameters_of(chunks):
            each = by_parameter.get(id(parameter))
            values = {} if each is None else each.optimizer.state.get(each.master, {})
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    found.setdefault(name, []).extend(pieces(source, local_tensor(value).detach()))
                else:
                    steps[source.template.key] = float(value)
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, (sorted(found), steps))
        state = State()
        for name in sorted({name for of_rank, _ in names for name in of_rank}):
            state.tensors[name] = gathered(found.get(name, []))
    for _, of_rank in names:
        state.steps.update(of_rank)
    return state


@torch.no_grad()
def copy_state(chunks: Sequence[Any], optimizer: Any, weights: Whole, state: State) -> None:
    """Put weights and state of the job into the model of one rank, whose parameters are whole."""
    of_masters = masters(optimizer)
    for parameter, found in by_piece(chunks, lambda p: of_masters.get(id(p), p.detach())):
        for piece in found:
            piece.data.copy_(weights.box(piece))
        master = of_masters.get(id(parameter))
        if master is not None and master.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(master)
    by_parameter = {id(each.parameter): each for each in trained(optimizer)}
    for parameter, source in parameters_of(chunks):
        each = by_parameter.get(id(parameter))
        if each is not None:
            _copy_of_parameter(each, source, state)


def _copy_of_parameter(each: Trained, source: Any, state: State) -> None:
    values = each.optimizer.state[each.master]
    if source.template.key not in state.steps and not any(source.template.key in w for w in state.tensors.values()):
        if not isinstance(each.optimizer, HyperMuon):
            values.clear()
        return
    for name, whole in state.tensors.items():
        if source.template.key in whole:
            local = torch.zeros_like(local_tensor(each.master))
            for piece in pieces(source, local):
                piece.data.copy_(whole.box(piece))
            if isinstance(values.get(name), torch.Tensor):
                local_tensor(values[name]).copy_(local)
            else:
                values[name] = local
    step = state.steps.get(source.template.key)
    if step is not None:
        if isinstance(values.get("step"), torch.Tensor) or "step" not in values:
            values["step"] = torch.tensor(step, dtype=torch.float32)
        else:
            values["step"] = type(values["step"])(step)


@contextlib.contextmanager
def _whole_momentum(parameters: Any) -> Iterator[None]:
    """Within it, every replica has Muon's momentum, which otherwise one of them keeps."""
    muons = {id(each.optimizer): each.optimizer for each in parameters if isinstance(each.optimizer, HyperMuon)}
    for muon in muons.values():
        muon.share_momentum()
    try:
        yield
    finally:
        for muon in muons.values():
            muon.drop_momentum()
