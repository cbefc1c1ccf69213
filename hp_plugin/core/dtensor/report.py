"""What `validate` found: every comparison, sorted by error, and the module in which the first fault lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hp_plugin.errors import HyperParallelError

Kind = Literal["loss", "grad_norm", "output", "output_gradient", "input_gradient", "gradient", "weight"]


class PlanMismatchError(HyperParallelError):
    """The plan and one process do not compute the same."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of the planned run against the same of one process.

    Attributes:
        kind: "gradient" and "weight" (after a step) are of parameters; the others of modules, or of the whole model.
        name: global name of the parameter, or module and tensor.
        module: the module it belongs to.
        error: relative error on the worst rank; see `hp_plugin.core.dtensor.tolerance`.
        tolerance: what rounding explains.
        rank: global rank with the largest error.
        detail: the first wrong element there.
    """

    kind: Kind
    name: str
    module: str
    error: float
    tolerance: float
    rank: int = 0
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the error is within the tolerance; nan is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class ValidationReport:
    """All comparisons of one validation; the same on every rank.

    Attributes:
        comparisons: sorted by error over tolerance, the largest first.
        location: name of the module in which the first fault lies; None if there is none, or no module shows it.
        reason: why this module.
        loss: of one process, before and after the step.
        planned_loss: of the planned run.
        subject: what was compared with one process, for people.
    """

    comparisons: tuple[Comparison, ...]
    location: str | None
    reason: str
    loss: tuple[float, float]
    planned_loss: tuple[float, float]
    subject: str = "the plan"

    @property
    def is_equal(self) -> bool:
        """Whether everything lies within its tolerance."""
        return all(comparison.is_equal for comparison in self.comparisons)

    @property
    def findings(self) -> tuple[Comparison, ...]:
        """The comparisons out of tolerance, sorted as all are."""
        return tuple(comparison for comparison in self.comparisons if not comparison.is_equal)

    def largest_error(self, kind: Kind) -> float:
        """The largest error of one kind; 0 where nothing of it was compared."""
        return max((c.error for c in self.comparisons if c.kind == kind), default=0.0)

    def raise_if_different(self) -> None:
        """Raises PlanMismatchError, with the report as its message, unless everything is equal."""
        if not self.is_equal:
            raise PlanMismatchError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"equal": self.is_equal} | dataclasses.asdict(self)

    def summary(self) -> str:
        """One sentence, and where the first fault lies."""
        wrong, count = self.findings, len(self.comparisons)
        if not wrong:
            return f"{self.subject} equals one process in all {count} comparisons."
        text = f"{self.subject} differs from one process in {len(wrong)} of {count} comparisons."
        if self.location is not None:
            text += f"\nfirst fault: module {self.location or '(model)'}: {self.reason}."
        return text

    def __str__(self) -> str:
        wrong = self.findings
        lines = [self.summary(), f"loss {self.loss[0]:.8g}, of {self.subject} {self.planned_loss[0]:.8g}"]
        lines.append(f"{'':2}{'kind':<16}{'error':>11}{'tolerance':>11}  name")
        for c in self.comparisons[: max(20, len(wrong))]:
            mark = " " if c.is_equal else "!"
            where = "" if c.is_equal else f"  (rank {c.rank}: {c.detail})"
            lines.append(f"{mark:2}{c.kind:<16}{c.error:>11.2e}{c.tolerance:>11.1e}  {c.name}{where}")
        return "\n".join(lines)


def locate(forward: Sequence[Comparison], backward: Sequence[Comparison]) -> tuple[str | None, str]:
    """The module in which the first fault lies.

    Args:
        forward: comparisons of outputs in the order of forward; a module comes after what it holds.
        backward: comparisons of gradients of outputs, inputs and parameters, those of outputs in the order of backward.

    Returns:
        Module and reason. Forward: the first module to give a wrong output. Backward: the innermost module that got
        the right gradient of its output and gives a wrong one of its input or of a parameter.
    """
    for c in forward:
        if not c.is_equal:
            return c.module, f"its output {c.name} is the first wrong one of forward"
    if _nearly_all_wrong(backward):
        return "", (
            "the gradients of parameters are wrong wherever they are, and those of outputs are right: what reduces or "
            "scales gradients between data-parallel ranks"
        )
    got_wrong = {c.module for c in backward if c.kind == "output_gradient" and not c.is_equal}
    gave_wrong: dict[str, Comparison] = {}
    for c in backward:
        if c.kind != "output_gradient" and not c.is_equal:
            gave_wrong.setdefault(c.module, c)
    for module in gave_wrong:
        inner = [other for other in gave_wrong if other != module and (not module or other.startswith(f"{module}."))]
        if not inner and not any(_holds(module, wrong) for wrong in got_wrong):
            c = gave_wrong[module]
            what = "the gradient of its parameter" if c.kind == "gradient" else "the gradient of its input"
            return module, f"its outputs have right gradients, but {what} {c.name} is wrong"
    if gave_wrong:
        module, c = next(iter(gave_wrong.items()))
        return module, f"the gradient of {c.name} is the first wrong one of backward"
    return None, ""


_NEARLY = 0.75


def _nearly_all_wrong(backward: Sequence[Comparison]) -> bool:
    """Whether parameters have wrong gradients that no module can have given all of them."""
    inside = [c for c in backward if c.kind != "gradient"]
    of_parameters = [c for c in backward if c.kind == "gradient"]
    wrong = sum(not c.is_equal for c in of_parameters)
    return len(of_parameters) > 2 and all(c.is_equal for c in inside) and wrong >= _NEARLY * len(of_parameters)


def _holds(module: str, other: str) -> bool:
    """Whether gradients of the outputs of `other` reach `module` first: the same module, or one around it."""
    return other == module or (bool(other) and module.startswith(f"{other}."))
