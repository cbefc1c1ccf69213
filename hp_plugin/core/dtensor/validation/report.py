"""What layout propagation found: one record per operation, and the first fault with the place where it lies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_plugin.core.dtensor.report import PlanMismatchError

FindingKind = Literal[
    "input", "output", "parameter", "value", "gradient", "random", "structure", "shape", "parameter_gradient"
]


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        kind: "input", "output", "parameter": at the border of a module. "value", "gradient": of an operation.
            "random": ranks drew numbers differently that should be the same. "structure": ranks, or a rank and one
            process, run different operations. "shape": a size that an axis does not divide.
            "parameter_gradient": after the real backward.
        module: path of the module; empty for the model itself.
        op: name of the operation; "boundary" at the border of a module.
        tensor: which tensor of the operation or module.
        axis: mesh axes on which expected and found differ.
        expected: placement that the plan or the operation asks for.
        found: placements that explain what was found; "none" if no placement does.
        rank: the rank (row-major over the plan's axes) that has the first wrong element.
        index: of that element in the whole tensor.
        expected_value: there, of one process.
        found_value: there, on that rank.
        reason: one sentence.
    """

    kind: FindingKind
    module: str
    op: str
    tensor: str = ""
    axis: str = ""
    expected: str = ""
    found: str = ""
    rank: int | None = None
    index: tuple[int, ...] | None = None
    expected_value: float | None = None
    found_value: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        text = f"module {self.module or '(model)'}, {self.op}"
        text += f", {self.tensor}" if self.tensor else ""
        text += f", axis {self.axis}" if self.axis else ""
        if self.expected or self.found:
            text += f": expected {self.expected or 'nothing'}, found {self.found or 'none'}"
        if self.index is not None:
            text += (
                f"; the first wrong element is {list(self.index)} on rank {self.rank}: {_number(self.found_value)} "
                f"instead of {_number(self.expected_value)}"
            )
        return f"{text}. {self.reason}".rstrip()


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.6g}"


class PlacementError(PlanMismatchError):
    """A tensor does not lie where the plan, or the operation that made it, says.

    Attributes:
        finding: what and where.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> Any:
        return type(self), (self.finding,)


@dataclass(frozen=True)
class Operation:
    """One operation that was followed.

    Attributes:
        module: path of the module in which it ran.
        op: its name.
        how: "rule": a rule knew the placement, and values agreed. "value": found by value alone. "boundary": a
            conversion of the plan. "region": compared at its borders only. "random": replayed.
        placements: of its outputs.
        note: what could not be checked, if anything.
    """

    module: str
    op: str
    how: Literal["rule", "value", "boundary", "region", "random"]
    placements: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class SimulationReport:
    """What following a plan through a model found. The same from simulated ranks and from processes.

    Attributes:
        axes: axis -> ranks, as the values were computed.
        planned_axes: axis -> ranks of the plan; larger than `axes` where values were computed on a reduced plan.
        findings: empty, or the first fault: following stops there.
        operations: what was followed, in the order of forward.
        parameters: number of parameters whose gradients were compared after backward.
        shapes_checked: ranks whose shapes were followed without values.
        axes_kind: "simulated ranks" or "processes".
    """

    axes: dict[str, int]
    planned_axes: dict[str, int]
    findings: tuple[Finding, ...]
    operations: tuple[Operation, ...] = field(repr=False)
    parameters: int = 0
    shapes_checked: int = 0
    axes_kind: Literal["simulated ranks", "processes"] = "simulated ranks"

    @property
    def is_equal(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def location(self) -> str | None:
        """The module of the first fault, if any."""
        return self.findings[0].module if self.findings else None

    @property
    def unchecked(self) -> tuple[Operation, ...]:
        """Operations of which something could not be checked, with the reason in `note`."""
        return tuple(operation for operation in self.operations if operation.note)

    def raise_if_different(self) -> None:
        """Raises PlacementError for the first fault."""
        if self.findings:
            raise PlacementError(self.findings[0])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"equal": self.is_equal} | dataclasses.asdict(self)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        how = Counter(operation.how for operation in self.operations)
        lines = [
            f"{len(self.operations)} operations followed on {self.axes_kind}, {axes}: "
            + (", ".join(f"{count} by {name}" for name, count in sorted(how.items())) or "none")
            + f"; {self.parameters} parameters' gradients compared."
        ]
        if self.axes != self.planned_axes:
            planned = ", ".join(f"{axis}={size}" for axis, size in self.planned_axes.items())
            lines.append(f"Values on the reduced plan; shapes on all {self.shapes_checked} ranks of {planned}.")
        for operation in self.unchecked:
            lines.append(f"  module {operation.module or '(model)'}, {operation.op}: {operation.note}")
        lines += [f"fault: {finding}" for finding in self.findings] or ["no fault."]
        return "\n".join(lines)
