"""Where a parameter lies in the flat buffers of ZeRO's ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hp_plugin.convert import pickles
from hp_plugin.convert.contents import StateValue, Stored
from hp_plugin.errors import ConfigurationError, UnsupportedError

_EXPERT = re.compile(r"(\.deepspeed_experts\.)(\d+)(\.)")


class Piece(NamedTuple):
    """Elements `start` to `start + numel` of the flat buffer `group` of `rank` are the next ones of a parameter.

    `whole` is where the parameter begins in a buffer that has all matrices of this partition whole, as Muon's momentum
    does in stages 1 and 2; None where there is no such buffer.
    """

    rank: int
    group: int
    start: int
    numel: int
    whole: int | None = None


@dataclass
class Pieces:
    """Masters and optimizer state of all ranks, in pieces.

    Attributes:
        shapes: Of parameters, by name, in the order of the checkpoint.
        pieces: Of parameters, by name, in order of their elements.
        masters: fp32 flat buffers, by rank and group.
        states: Optimizer state of them, by rank and group.
        groups: Parameter groups of the optimizer, with names.
        touched: Elements of all parameters that lie in a buffer with at least one element, by rank and group.
    """

    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, list[Piece]]
    masters: list[list[torch.Tensor]]
    states: list[list[dict[str, Any]]]
    groups: list[dict[str, Any]]
    touched: dict[tuple[int, int], int] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigurationError where pieces are not as many elements as their parameter has."""
        for name, shape in self.shapes.items():
            found = sum(piece.numel for piece in self.pieces.get(name, ()))
            if found != math.prod(shape):
                raise ConfigurationError(
                    f"the pieces of {name} are {found} elements together, but its shape {shape} has "
                    f"{math.prod(shape)}; the checkpoint is incomplete or its files are of several saves."
                )
            for piece in self.pieces[name]:
                if piece.start + piece.numel > self.masters[piece.rank][piece.group].numel():
                    raise ConfigurationError(
                        f"{name} should end at element {piece.start + piece.numel} of buffer {piece.group} of rank "
                        f"{piece.rank}, which has {self.masters[piece.rank][piece.group].numel()}; files do not fit."
                    )

    def weight(self, name: str) -> Stored:
        """The fp32 master of a parameter."""
        flats = [self.masters[piece.rank][piece.group] for piece in self.pieces[name]]
        return self._stored(name, flats)

    def state(self, name: str) -> dict[str, StateValue]:
        """Optimizer state of a parameter, by key."""
        pieces = self.pieces[name]
        first = self.states[pieces[0].rank][pieces[0].group]
        found: dict[str, StateValue] = {}
        for key, value in first.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                if isinstance(value, (int, float, torch.Tensor)):
                    found[key] = float(value)
                continue
            if self._is_whole(key, pieces[0], value):
                found[key] = self._whole(name, value, pieces[0])
            else:
                found[key] = self._stored(name, [self.states[p.rank][p.group][key] for p in pieces])
        return found

    def _stored(self, name: str, flats: list[torch.Tensor]) -> Stored:
        shape, pieces = self.shapes[name], self.pieces[name]

        def read() -> torch.Tensor:
            parts = [flat.view(-1).narrow(0, piece.start, piece.numel) for flat, piece in zip(flats, pieces)]
            return torch.cat([part.detach() for part in parts]).view(shape)

        return Stored(shape, flats[0].dtype, read)

    def _is_whole(self, key: str, piece: Piece, value: torch.Tensor) -> bool:
        if key != "momentum_buffer" or piece.whole is None:
            return False
        total = self.touched[piece.rank, piece.group]
        return value.numel() == total and total != self.masters[piece.rank][piece.group].numel()

    def _whole(self, name: str, flat: torch.Tensor, piece: Piece) -> Stored:
        shape, start = self.shapes[name], piece.whole
        assert start is not None
        part = flat.detach().narrow(0, start, math.prod(shape)).view(shape)
        return Stored(shape, flat.dtype, part.contiguous)


def of_stages_1_and_2(states: list[dict[str, Any]], model: dict[str, Any]) -> Pieces:
    """From the `optimizer_state_dict` of every rank, by rank, and a model file."""
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    optimizers = [_Optimizer(state["base_optimizer_state"], state) for state in states]
    masters = [list(state["single_partition_of_fp32_groups"]) for state in states]
    found = Pieces({}, {}, masters, [optimizer.states for optimizer in optimizers], [])
    names: list[dict[str, None]] = [{} for _ in masters[0]]
    for rank, state in enumerate(states):
        for group, mapping in enumerate(state["param_slice_mappings"]):
            rename = _expert_names(mapping, states, rank, group)
            whole = 0
            for local, address in mapping.items():
                name, shape = rename(local), shapes[local]
                where = _address(address)
                found.shapes.setdefault(name, shape)
                found.pieces.setdefault(name, []).append(Piece(rank, group, *where, whole))
                names[group][name] = None
                whole += math.prod(shape)
            found.touched[rank, group] = whole
    _refuse_unnamed(shapes, found)
    found.groups = optimizers[0].groups(names)
    found.check()
    return found


def of_stage_3(states: list[dict[str, Any]], model: dict[str, Any]) -> Pieces:
    """From the `optimizer_state_dict` of every rank, by rank, and a model file."""
    if states[0].get("ds_zero_partition_groups"):
        raise UnsupportedError(
            "the checkpoint partitions parameters over several groups of ranks (AutoEP), which HyperFSDP does not "
            "read; convert it with DeepSpeed's ds_to_universal."
        )
    shapes = model["param_shapes"]
    optimizers = [_Optimizer(state["optimizer_state_dict"], state) for state in states]
    masters = [list(state["fp32_flat_groups"]) for state in states]
    found = Pieces({}, {}, masters, [optimizer.states for optimizer in optimizers], [])
    for group, named in enumerate(shapes):
        offset = 0
        for name, given in named.items():
            shape = tuple(given)
            numel = math.prod(shape)
            part = -(-numel // len(states))
            found.shapes[name] = shape
            found.pieces[name] = [
                Piece(rank, group, offset, max(0, min(part, numel - rank * part))) for rank in range(len(states))
            ]
            offset += part
    found.groups = optimizers[0].groups([dict.fromkeys(named) for named in shapes])
    found.check()
    return found


class _Optimizer:
    """The inner optimizer's state dict, whose parameters are flat buffers; elastic checkpoints keep a list instead."""

    def __init__(self, base: Any, outer: dict[str, Any]) -> None:
        self._groups = [] if isinstance(base, list) else [dict(group) for group in base["param_groups"]]
        by_index = dict(enumerate(base)) if isinstance(base, list) else base["state"]
        buffers = outer.get("single_partition_of_fp32_groups") or outer["fp32_flat_groups"]
        self.states: list[dict[str, Any]] = [dict(by_index.get(index, {})) for index in range(len(buffers))]
        if "base_optimizer_state_step" in outer:
            for state in self.states:
                state.setdefault("step", outer["base_optimizer_state_step"])

    def groups(self, names: list[dict[str, None]]) -> list[dict[str, Any]]:
        """Parameter groups with the names of all that lies in their buffers."""
        if not self._groups:
            return [{"params": list(named)} for named in names]
        return [
            {**group, "params": [name for index in group["params"] for name in names[index]]} for group in self._groups
        ]


def _address(value: Any) -> tuple[int, int]:
    fields = pickles.values(value)
    if isinstance(fields, dict):
        return int(fields["start"]), int(fields["numel"])
    numel, start = fields
    return int(start), int(numel)


def _expert_names(mapping: dict[str, Any], states: list[dict[str, Any]], rank: int, group: int) -> Any:
    """What renames a rank's own experts to their numbers in the whole layer, as DeepSpeed does in its model files."""
    local = {int(match[2]) for name in mapping if (match := _EXPERT.search(name))}
    counts = states[rank].get("partition_count")
    if not local or not isinstance(counts, (list, tuple)):
        return lambda name: name
    experts_parallel = len(states) // int(counts[group])
    first = (rank % experts_parallel) * _experts_of_a_rank(states, group)
    return lambda name: _EXPERT.sub(lambda m: f"{m[1]}{first + int(m[2])}{m[3]}", name)


def _experts_of_a_rank(states: list[dict[str, Any]], group: int) -> int:
    mappings = [state["param_slice_mappings"][group] for state in states]
    numbers = {int(match[2]) for mapping in mappings for name in mapping if (match := _EXPERT.search(name))}
    return max(numbers) + 1


def _refuse_unnamed(shapes: dict[str, tuple[int, ...]], found: Pieces) -> None:
    absent = [name for name, shape in shapes.items() if name not in found.shapes and torch.Size(shape).numel()]
    if absent:
        raise ConfigurationError(
            f"{len(absent)} parameters are in no optimizer file ({', '.join(absent[:3])}, ...); the checkpoint is "
            "incomplete."
        )
