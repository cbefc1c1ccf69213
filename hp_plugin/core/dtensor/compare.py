"""Compares a planned run with one process, tensor by tensor, each rank its own piece."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_plugin.core.dtensor.applied import AppliedPlan, applied_plan
from hp_plugin.core.dtensor.plan import Placed, ShardingPlan
from hp_plugin.core.dtensor.report import Comparison, Kind, ValidationReport, locate
from hp_plugin.core.dtensor.tolerance import FLOOR, relative_error, tolerance
from hp_plugin.core.dtensor.trace import Crossing, Trace
from hp_plugin.core.layout import AttachedLayout, Layout


@dataclass(frozen=True)
class RunResult:
    """What one run gave.

    Attributes:
        trace: what crossed the borders of modules.
        losses: before and after the step.
        norm: of all gradients.
        gradients: by parameter name, local; None where there is none.
        weights: after the step, by parameter name, local.
        step: the learning rate that the default optimizer used.
    """

    trace: Trace
    losses: tuple[float, float]
    norm: float
    gradients: Mapping[str, torch.Tensor | None]
    weights: Mapping[str, torch.Tensor]
    step: float


def whole_named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names in the whole model, tied names included."""
    applied = applied_plan(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name if applied is None else applied.whole_name(name): parameter for name, parameter in named}


class Comparer:
    """Compares on every rank, then merges: the largest error of each tensor counts.

    Args:
        plan: the plan.
        model: the planned model, for the layouts of its parameters.
        expected: one process.
        found: the planned run.
        mesh: the mesh of the planned run.
        data_axes: axes over which the batch was divided, outermost first.
        reduction_length: for the tolerance.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        model: nn.Module,
        expected: RunResult,
        found: RunResult,
        mesh: DeviceMesh,
        data_axes: tuple[str, ...],
        *,
        reduction_length: int,
    ) -> None:
        self._plan = plan
        applied = applied_plan(model)
        assert applied is not None
        self._applied: AppliedPlan = applied
        self._parameters = whole_named(model)
        self._layouts = {applied.whole_name(name): layout for name, layout in applied.layouts.items()}
        self._expected = expected
        self._found = found
        self._data = [(mesh[axis].size(), mesh.get_local_rank(axis)) for axis in data_axes]
        self._replicas = math.prod(size for size, _ in self._data)
        dtypes = [
            t.dtype for t in [*expected.weights.values(), *expected.trace.values.values()] if t.is_floating_point()
        ]
        lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        self._tolerance = tolerance(lowest, reduction_length)
        self._gradient_floor = FLOOR * expected.norm
        self._weight_floor = FLOOR * _norm(expected.weights)

    def report(self) -> ValidationReport:
        """The comparisons of all ranks, merged. Every rank must call."""
        forward = self._merged([c for crossing in self._expected.trace.values if (c := self._value(crossing))])
        backward = self._merged(
            [c for crossing in self._expected.trace.gradients if (c := self._gradient_at(crossing))]
            + [self._parameter(name, "gradient") for name in self._expected.gradients]
        )
        others = self._merged([*self._scalars(), *(self._parameter(n, "weight") for n in self._expected.weights)])
        location, reason = locate(forward, backward)
        ordered = sorted([*forward, *backward, *others], key=lambda c: -_excess(c))
        return ValidationReport(tuple(ordered), location, reason, self._expected.losses, self._found.losses)

    # ---------------------------------------------------------------- single comparisons

    def _scalars(self) -> list[Comparison]:
        pairs: list[tuple[Kind, str, float, float]] = [
            ("loss", "loss", self._found.losses[0], self._expected.losses[0]),
            ("loss", "loss after the step", self._found.losses[1], self._expected.losses[1]),
            ("grad_norm", "gradient norm", self._found.norm, self._expected.norm),
        ]
        return [
            self._compared(kind, name, "", torch.tensor(found), torch.tensor(expected), 0.0)
            for kind, name, found, expected in pairs
        ]

    def _value(self, crossing: Crossing) -> Comparison | None:
        if crossing.side == "input":
            return None  # what arrives is what some other module, or the model between modules, has given
        placed = self._plan.modules[crossing.module].outputs[crossing.name].leaves
        expected, found = self._expected.trace.values[crossing], self._found.trace.values.get(crossing)
        if not expected.is_floating_point() or any(p.kind == "partial" for p in placed.values()):
            return None
        return self._compared("output", _label(crossing), crossing.module, found, self._piece(expected, placed), 0.0)

    def _gradient_at(self, crossing: Crossing) -> Comparison | None:
        spec = self._plan.modules[crossing.module]
        is_input = crossing.side == "input"
        placed = spec.inputs[crossing.name].arrives if is_input else spec.outputs[crossing.name].leaves
        dual = {axis: placement.gradient for axis, placement in placed.items()}
        if any(p.kind == "partial" for p in dual.values()):
            return None
        # One process averages over the whole batch, each replica over its part.
        found = self._found.trace.gradients.get(crossing)
        found = None if found is None else found / self._replicas
        expected = self._piece(self._expected.trace.gradients[crossing], dual)
        kind: Kind = "input_gradient" if is_input else "output_gradient"
        return self._compared(
            kind, _label(crossing), crossing.module, found, expected, self._activation_floor(crossing)
        )

    def _activation_floor(self, crossing: Crossing) -> float:
        return FLOOR * torch.linalg.vector_norm(self._expected.trace.gradients[crossing].double()).item()

    def _parameter(self, name: str, kind: Kind) -> Comparison:
        if name not in self._parameters:  # an expert of another rank
            return Comparison(kind, name, self._owner(name), 0.0, self._tolerance, dist.get_rank())
        expected = (self._expected.gradients if kind == "gradient" else self._expected.weights)[name]
        found = (self._found.gradients if kind == "gradient" else self._found.weights).get(name)
        if expected is None and found is not None:
            expected_piece: torch.Tensor | None = torch.zeros_like(found)
        else:
            expected_piece = None if expected is None else self._piece_of_parameter(name, expected)
        floor = self._gradient_floor if kind == "gradient" else self._weight_floor
        return self._compared(kind, name, self._owner(name), found, expected_piece, floor)

    def _owner(self, name: str) -> str:
        """The innermost module of the plan that holds the parameter."""
        owner = name.rpartition(".")[0]
        while owner not in self._plan.modules and owner:
            owner = owner.rpartition(".")[0]
        return owner

    def _piece_of_parameter(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        piece = self._layouts[name].take(whole)
        parameter = self._parameters[name]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            piece = AttachedLayout(Layout.from_dtensor(parameter), tuple(coordinate), groups).take(piece)
        return piece

    def _piece(self, whole: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Of a tensor of one process, what this rank should have."""
        for size, rank in self._data:
            if whole.ndim == 0 or whole.shape[0] % size:
                break
            whole = whole.chunk(size)[rank]
        return self._applied.layout_of(tuple(whole.shape), placed).take(whole)

    def _compared(
        self,
        kind: Kind,
        name: str,
        module: str,
        found: torch.Tensor | None,
        expected: torch.Tensor | None,
        floor: float,
    ) -> Comparison:
        make = Comparison(kind, name, module, 0.0, self._tolerance, dist.get_rank())
        if found is None or expected is None:
            if found is None and expected is None:
                return make
            return replace(
                make, error=math.inf, detail=f"there is {'none' if found is None else 'one'}, unlike in one process"
            )
        if found.shape != expected.shape:
            return replace(make, error=math.inf, detail=f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        error = relative_error(found, expected, floor)
        detail = "" if error <= self._tolerance else first_wrong(found, expected, self._tolerance)
        return replace(make, error=error, detail=detail)

    # ---------------------------------------------------------------- all ranks

    @staticmethod
    def _merged(comparisons: list[Comparison]) -> list[Comparison]:
        """For each tensor the comparison of the rank with the largest error; the order is kept."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, comparisons)
        return [max(column, key=_excess) for column in zip(*everyone, strict=True)]


def _excess(comparison: Comparison) -> float:
    ratio = comparison.error / comparison.tolerance
    return math.inf if math.isnan(ratio) else ratio


def _label(crossing: Crossing) -> str:
    call = f", call {crossing.call + 1}" if crossing.call else ""
    return f"{crossing.module or '(model)'}, {crossing.side} {crossing.name}{call}"


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


def first_wrong(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """The first element that lies apart by more than the tolerance, relative to the largest one."""
    allowed = tolerance * expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    wrong = ~((found - expected).abs() <= allowed)
    if not wrong.any():
        return f"no single element stands out, {found.numel()} together do"
    index = tuple(wrong.nonzero()[0].tolist())
    return f"element {list(index)} is {found[index].item():.6g}, expected {expected[index].item():.6g}"
