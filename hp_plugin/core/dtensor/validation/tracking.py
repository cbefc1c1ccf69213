"""What following a model keeps: where each tensor lies, and where one process is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hp_plugin.core.dtensor.applied import AppliedPlan
from hp_plugin.core.dtensor.placement import COPY
from hp_plugin.core.dtensor.plan import Placed
from hp_plugin.core.dtensor.validation.arrangement import Grid, Placing, by_value, with_gradients
from hp_plugin.core.dtensor.validation.calls import Snapshots, version_of
from hp_plugin.core.dtensor.validation.checker import Cell, Checker, Repeat, Site
from hp_plugin.core.dtensor.validation.compare import Scale
from hp_plugin.core.dtensor.validation.exchange import Exchange
from hp_plugin.core.dtensor.validation.reference import EnterRecord, LeaveRecord, OperationRecord, Record, Whole
from hp_plugin.core.dtensor.validation.report import Finding, FindingKind, Operation


class Repeatable(Protocol):
    """What can be run again on copies: outputs, and the leaves that stand for its differentiable inputs."""

    def repeat(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs it again."""
        ...


class Repeated:
    """Stands for a call that is repeated in a way of its own."""

    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat


class Tracking:
    """Placements of tensors, found once and looked up by tensor, and the record of one process.

    The placements are beside the tensors and not in them: kernels, autograd functions and optimizers see plain tensors.

    Args:
        applied: the plan, as applied.
        exchange: the other ranks.
        model: the planned model.
        weights: parameter name -> whole value of one process.
        regions: names of modules, or patterns, that are compared at their borders only.
    """

    def __init__(
        self,
        applied: AppliedPlan,
        exchange: Exchange,
        model: nn.Module,
        weights: Mapping[str, torch.Tensor],
        regions: Sequence[str] = (),
    ) -> None:
        self.plan = applied.plan
        self.exchange = exchange
        self.checker = Checker(exchange)
        self.operations: list[Operation] = []
        self.regions = tuple(regions)
        self.is_following = False
        self._applied = applied
        self._model = model
        self._weights = weights
        self._placed = applied.plan.placed_parameters()
        self._cells = WeakTensorKeyDictionary()
        self._snapshots = Snapshots()
        self._records: list[Record] = []
        self._cursor = 0
        self._modules: list[str] = []
        self._depth = 0
        self._longest = 1
        # Axes over which the batch is divided too: tensors are pieces there, whatever the entries say.
        self._batch = tuple(a in applied.plan.batch and n > 1 for a, n in zip(self.grid.axes, self.grid.sizes))

    @property
    def grid(self) -> Grid:
        """The plan's axes as this rank sees them."""
        return self.exchange.grid

    # ---------------------------------------------------------------- placements of tensors

    def known(self, tensor: torch.Tensor) -> Cell | None:
        """The tensor's placements, unless it has been written since they were found."""
        cell: Cell | None = self._cells.get(tensor)
        return cell if cell is not None and cell.version == version_of(tensor) else None

    def cell(self, tensor: torch.Tensor, whole: Whole, site: Site, what: str) -> Cell:
        """The tensor's placements; found by value where they are not known. Every rank must call."""
        cell = self.known(tensor)
        if cell is None:
            found = self.inferred(tensor.detach(), whole, site, what, flows=tensor.requires_grad)
            cell = self.put(tensor, found.placings)
        return cell

    def inferred(self, value: torch.Tensor, whole: Whole, site: Site, what: str, *, flows: bool) -> Cell:
        """Placements that explain `value`. Every rank must call."""
        scale = Scale.of([], [whole.value])
        site = Site(site.module, site.op, site.kinds, (), (what,))
        [found] = self.checker.by_value(site, [value], [whole.value], scale)
        if not found:
            self.checker.report_value(site, 0, value, whole.value, scale)
        return Cell([t for p in found for t in with_gradients(p, self.grid.sizes)] if flows else found)

    def put(self, tensor: torch.Tensor, placings: list[Placing]) -> Cell:
        """Notes the tensor's placements."""
        cell = Cell(placings, version_of(tensor))
        self._cells[tensor] = cell
        return cell

    def keep(self, outputs: Sequence[torch.Tensor], wholes: Sequence[Whole], found: list[list[Placing]]) -> None:
        """Notes the outputs' placements, and rounds values off to those of one process.

        Otherwise rounding would add up from operation to operation, and a near tie of experts could be chosen another
        way. Sums that are still divided into summands stay as they are.
        """
        for output, whole, placings in zip(outputs, wholes, found, strict=True):
            self.put(output, placings)
            if any(p.kind == "partial" for p in placings[0]) or not output.is_floating_point():
                continue
            piece = self.grid.cut(whole.value, placings[0])
            overlaps = any(s == 0 and n > 1 for s, n in zip(output.stride(), output.shape, strict=True))
            if not overlaps and not torch.equal(output.detach(), piece):
                output.data.copy_(piece)

    # ---------------------------------------------------------------- placements of parameters

    def whole_of(self, name: str, parameter: torch.Tensor) -> Whole:
        """A parameter as one process has it."""
        return Whole(self._weights[self._applied.whole_name(name)], parameter.requires_grad)

    def placing_of(self, name: str, placed: Placed, ndim: int) -> Placing:
        """Where a parameter lies. Over an axis of the batch, one that all ranks have is used by each for other rows."""
        placing = self.grid.placing(placed, ndim)
        return tuple(
            COPY if batch and not p.is_shard and not self._is_apart(name, axis) else p
            for p, batch, axis in zip(placing, self._batch, self.grid.axes, strict=True)
        )

    def held(self, name: str, parameter: torch.Tensor) -> Placing:
        """Where ranks keep a parameter."""
        return self.placing_of(name, self._placed[self._applied.whole_name(name)].held, parameter.ndim)

    def mean_over(self, name: str, parameter: torch.Tensor) -> int:
        """By how much the gradient of a parameter is divided, as a mean over the batch that others do for the rest."""
        count = 1
        for p, batch, size in zip(self.held(name, parameter), self._batch, self.grid.sizes, strict=True):
            count *= size if batch and p != COPY else 1
        return count

    def _is_apart(self, name: str, axis: str) -> bool:
        """Whether each rank has a parameter of its own there, of an expert."""
        return any(
            spec.dispatch == axis and name.startswith(f"{module}.") for module, spec in self.plan.modules.items()
        )

    def without_batch(self, placing: Placing) -> Placing:
        """By value, without what the plan's entries do not say."""
        return tuple(p for p, batch in zip(by_value(placing), self._batch, strict=True) if not batch)

    def on_batch_of(self, placing: Placing, other: Placing) -> Placing:
        """`placing`, with that of `other` on the axes of the batch."""
        return tuple(q if batch else p for p, q, batch in zip(placing, other, self._batch, strict=True))

    # ---------------------------------------------------------------- checks

    def verify(
        self,
        site: Site,
        record: OperationRecord,
        outputs: list[torch.Tensor],
        cells: list[Cell],
        call: Repeatable,
        *,
        native: bool = False,
        exact: Sequence[Placing] = (),
    ) -> list[list[Placing]]:
        """Both checks; returns the placings of each output. `exact`: what they must be. Every rank must call."""
        wholes = [whole.value for whole in record.outputs]
        scale = Scale.of([whole.value for whole in record.inputs], wholes)
        self._longest = max(self._longest, scale.length)
        hints = [hint for cell in cells for hint in cell.hints()] + [p for t in exact for p in t if p.is_shard]
        found = self.checker.by_value(site, outputs, wholes, scale, hints)
        for index, output in enumerate(outputs):
            if not found[index] or (exact and by_value(exact[index]) not in found[index]):
                self.checker.report_value(site, index, output, wholes[index], scale, found[index])
        followed = [i for i, whole in enumerate(record.outputs) if whole.requires_grad]
        tried = [
            [exact[i]] if exact else [t for p in f for t in with_gradients(p, self.grid.sizes)] if i in followed else f
            for i, f in enumerate(found)
        ]
        if not followed or not record.gradients:
            return tried
        whole = self.grid.placing({}, 0)
        if native and all(cell.placings == [whole] for cell in cells) and all(whole in f for f in found):
            return [[whole] for _ in found]
        return self.checker.by_gradient(site, record, tried, cells, call.repeat, scale)

    # ---------------------------------------------------------------- place in the record

    def peek(self) -> Record | None:
        """What one process does next."""
        return self._records[self._cursor] if self._cursor < len(self._records) else None

    def take(self, kind: type[Any], name: str) -> Any:
        """What one process does next, which must be this."""
        record = self.peek()
        mine = f"operation {name}" if kind is OperationRecord else f"{_VERB[kind]} module {name or '(model)'}"
        found = (record.name if isinstance(record, OperationRecord) else record.module) if record is not None else None
        if not isinstance(record, kind) or found != name:
            theirs = "the end" if record is None else describe(record)
            op = name if kind is OperationRecord else "call"
            self.fail_structure(op, f"This rank is at {mine}, one process at {theirs}.")
        self._cursor += 1
        return record

    def fail_structure(self, op: str, reason: str) -> NoReturn:
        """Raises, on all ranks, that this one does not run what one process does."""
        self.checker.fail(self.finding("structure", op, reason))

    def finding(self, kind: FindingKind, op: str, reason: str) -> Finding:
        """A finding at the present place, of no single tensor."""
        site = self.site(op)
        return Finding(kind, site.module, op, axis=", ".join(self.grid.divided), rank=self.grid.index, reason=reason)

    def site(self, op: str) -> Site:
        """The present place."""
        return Site(self._modules[-1] if self._modules else "", op)

    def log(self, site: Site, how: Any, found: list[list[Placing]], note: str = "") -> None:
        """Notes an operation for the report."""
        placements = tuple(" or ".join(self.grid.describe(p) for p in placings) for placings in found)
        self.operations.append(Operation(site.module, site.op, how, placements, note))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Operations are ours while it lasts, and not followed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


_VERB: dict[type[Any], str] = {EnterRecord: "entering", LeaveRecord: "leaving"}


def describe(record: Record) -> str:
    """For people."""
    if isinstance(record, OperationRecord):
        return f"operation {record.name} of module {record.module or '(model)'}"
    return f"{_VERB[type(record)]} module {record.module or '(model)'}"
