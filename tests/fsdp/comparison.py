"""The record of a training run, and the one comparison that every equivalence test and negative control uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass
class Record:
    """What a run did, step by step.

    Attributes:
        losses: mean loss over the global batch.
        norms: total gradient norm before clipping.
        gradients: full gradient of every parameter before clipping, by name.
        weights: full value of every parameter after the step, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def first_step(self) -> Record:
        """The record of the first step alone."""
        return Record(self.losses[:1], self.norms[:1], self.gradients[:1], self.weights[:1])


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart.

    Attributes:
        loss: relative.
        norm: relative.
        gradient: largest difference within a parameter, relative to the largest entry of its reference gradient.
        weight: largest absolute difference within a parameter.
    """

    loss: float
    norm: float
    gradient: float
    weight: float


@dataclass(frozen=True)
class Difference:
    """One quantity of one step that is beyond tolerance.

    Attributes:
        step: of the run.
        quantity: "loss", "norm", "gradient", "weight" or "steps".
        name: of the parameter; empty for quantities of the whole model.
        text: what was found and what was allowed.
    """

    step: int
    quantity: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.quantity} {self.name}".rstrip() + f" {self.text}"


# In both, a weight moves by up to the learning rate, 1e-2, in a step.
# Only the order of summation differs: between torch's own back ends 1e-7, 2e-7, 1.5e-6 and 1.1e-6 were measured.
FLOAT32 = Tolerance(loss=2e-6, norm=2e-6, gradient=4e-6, weight=4e-6)
# From the second step on, last digits of float32 weights decide how single weights round to bfloat16; between torch's
# own back ends 1.3e-5, 5e-5, 1.3e-2 and 4e-4 were measured. The first step is held to FLOAT32.
BFLOAT16 = Tolerance(loss=5e-5, norm=2e-4, gradient=5e-2, weight=2e-3)


def assert_same_mixed_training(record: Record, reference: Record) -> None:
    """`assert_same_training` for bfloat16 compute: the first step within FLOAT32, all steps within BFLOAT16."""
    assert_same_training(record.first_step(), reference.first_step(), FLOAT32)
    assert_same_training(record, reference, BFLOAT16)


def assert_same_training(record: Record, reference: Record, tolerance: Tolerance) -> None:
    """Check losses, gradient norms, every gradient and the weights after every step.

    Raises:
        AssertionError: lists what differs, by step and name, the worst parameters first.
    """
    found = differences(record, reference, tolerance)
    if found:
        more = f"\n... and {len(found) - 20} more" if len(found) > 20 else ""
        raise AssertionError("the runs differ:\n" + "\n".join(str(each) for each in found[:20]) + more)


def differences(record: Record, reference: Record, tolerance: Tolerance) -> list[Difference]:
    """What is beyond tolerance, step by step, within a step the loss first, then the norm, gradients and weights."""
    steps = len(reference.losses)
    lengths = {len(values) for run in (record, reference) for values in vars(run).values()}
    if lengths != {steps} or steps == 0:
        return [Difference(0, "steps", "", f"the runs have {sorted(lengths)} steps")]
    found: list[Difference] = []
    for step in range(steps):
        found += _scalar(step, "loss", record.losses[step], reference.losses[step], tolerance.loss)
        found += _scalar(step, "norm", record.norms[step], reference.norms[step], tolerance.norm)
        found += _tensors(step, "gradient", record.gradients[step], reference.gradients[step], tolerance.gradient)
        found += _tensors(step, "weight", record.weights[step], reference.weights[step], tolerance.weight)
    return found


def _scalar(step: int, quantity: str, value: float, expected: float, limit: float) -> list[Difference]:
    if abs(value - expected) <= limit * abs(expected):  # False for NaN
        return []
    return [Difference(step, quantity, "", f"is {value!r}, expected {expected!r} within {limit:g} relative")]


def _tensors(
    step: int, quantity: str, values: dict[str, Tensor], expected: dict[str, Tensor], limit: float
) -> list[Difference]:
    if values.keys() != expected.keys():
        return [Difference(step, quantity, "", f"names differ: {sorted(values.keys() ^ expected.keys())}")]
    found: list[tuple[float, Difference]] = []
    for name, reference in expected.items():
        value = values[name]
        if value.shape != reference.shape or value.dtype != reference.dtype:
            text = f"is {tuple(value.shape)} {value.dtype}, expected {tuple(reference.shape)} {reference.dtype}"
            found.append((math.inf, Difference(step, quantity, name, text)))
            continue
        difference = float((value.double() - reference.double()).abs().max())
        bound = limit * float(reference.double().abs().max()) if quantity == "gradient" else limit
        if not difference <= bound:  # True for NaN
            text = f"differs by {difference:.3g}, allowed {bound:.3g}"
            found.append((difference / max(bound, 1e-300), Difference(step, quantity, name, text)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


def worst_difference(record: Record, reference: Record) -> Tolerance:
    """The largest differences between two runs, in the measures of `Tolerance`."""

    def relative(values: list[float], expected: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))

    def largest(values: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], *, scaled: bool) -> float:
        worst = 0.0
        for ours, theirs in zip(values, expected, strict=True):
            for name, reference in theirs.items():
                difference = float((ours[name].double() - reference.double()).abs().max())
                worst = max(worst, difference / float(reference.double().abs().max()) if scaled else difference)
        return worst

    return Tolerance(
        loss=relative(record.losses, reference.losses),
        norm=relative(record.norms, reference.norms),
        gradient=largest(record.gradients, reference.gradients, scaled=True),
        weight=largest(record.weights, reference.weights, scaled=False),
    )


def full_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full values, detached, of plain tensors and of DTensors that are sharded over the last axis of one mesh.

    Every rank of the mesh must call. One exchange for all tensors: `full_tensor` of each would cost more than training.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in sharded}
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        group = mesh.get_group(mesh.ndim - 1)
        pieces: list[Any] = [None] * group.size()
        mine = {name: tensor._local_tensor.detach().clone() for name, tensor in sharded.items()}
        dist.all_gather_object(pieces, mine, group=group)
        for name, tensor in sharded.items():
            values[name] = torch.cat([piece[name] for piece in pieces], dim=tensor.placements[-1].dim)
            if values[name].shape != tensor.shape:
                raise AssertionError(f"{name}: shards make {tuple(values[name].shape)}, declared {tuple(tensor.shape)}")
    return {name: values[name] for name in tensors}


def full(tensor: Tensor) -> Tensor:
    """The full value of a plain tensor or DTensor, detached. Every rank of a DTensor's mesh must call."""
    with torch.no_grad():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return value.detach().clone()
