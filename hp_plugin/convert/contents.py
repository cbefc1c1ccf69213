"""What a checkpoint holds, whatever its format: names, shapes, and how to read each tensor."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.

    Attributes:
        shape: Of the whole tensor.
        dtype: As it is stored.
        read: Gives the whole tensor, on the host and contiguous. Every call reads again.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def as_dtype(self, dtype: torch.dtype | None) -> Stored:
        """The same in another dtype, if it is a floating one; None leaves it."""
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return Stored(self.shape, dtype, lambda: self.read().to(dtype))


StateValue = Stored | float | int
"""One entry of a parameter's optimizer state; a step may be a number."""


@dataclass
class Contents:
    """What a checkpoint holds.

    Attributes:
        format: For people, such as "ZeRO-2 of 4 ranks".
        weights: Parameters by name, in fp32 where the checkpoint has masters. Tied ones once, under one name.
        buffers: Persistent buffers by name.
        tied: Further names of parameters: that name -> its name in `weights`.
        frozen: Names of parameters that have no optimizer state because they were not trained.
        state: By parameter: the optimizer's state, such as "exp_avg", "exp_avg_sq", "step" or "momentum_buffer".
        groups: Options of the optimizer's parameter groups, each with "params", a list of names.
        optimizer: "adam", "muon" (Muon with Adam for the rest), "other", or None where there is no state.
        optimizer_class: Name of its class, where the checkpoint tells.
        counters: global_steps, global_samples, skipped_steps, as far as they are known.
        scheduler: State of the learning-rate scheduler, or None.
        loss_scale: State of a dynamic loss scale, by the names of DeepSpeed's scaler; None where there was none.
        client: The caller's own values.
        clients: The same of further ranks, where they differ: by rank.
        missing: Sentences on what the format cannot hold.
    """

    format: str
    weights: dict[str, Stored]
    buffers: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    state: dict[str, dict[str, StateValue]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str | None = None
    optimizer_class: str | None = None
    counters: dict[str, int] = field(default_factory=dict)
    scheduler: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, float] | None = None
    client: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _group_of: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def canonical(self, name: str) -> str | None:
        """The name in `weights` of a parameter that may have several; None where it has none."""
        if name in self.weights:
            return name
        return self.tied.get(name)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Every tensor under a unique key: weights, buffers and optimizer state."""
        for name, stored in self.weights.items():
            yield f"weight {name}", stored
        for name, stored in self.buffers.items():
            yield f"buffer {name}", stored
        for name, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Stored) and value.shape:
                    yield f"state {name} {key}", value

    def group_of(self, name: str) -> dict[str, Any] | None:
        """The options with which a parameter was trained."""
        if len(self._group_of) != sum(len(group["params"]) for group in self.groups):
            self._group_of = {name: group for group in self.groups for name in group["params"]}
        return self._group_of.get(name)


def number(value: StateValue) -> float:
    """A step, whether it is a number or a tensor of one element."""
    return float(value.read()) if isinstance(value, Stored) else float(value)


def of_tensor(tensor: torch.Tensor) -> Stored:
    """A tensor that is in memory, or mapped into it, already."""
    return Stored(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().contiguous())


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the elements' bytes in row-major order."""
    flat = tensor.detach().contiguous().view(-1)
    return zlib.crc32(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0
