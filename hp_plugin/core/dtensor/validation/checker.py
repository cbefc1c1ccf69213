"""The two checks of one operation: which placements explain its outputs, and which of them its gradients allow.

Value: every rank compares its output with the piece of the whole one that a placement names; a partial sum is added up
over the ranks. All placements that hold on all ranks are kept: a constant has several.

Gradient: a random gradient of the whole output is laid out over the ranks by the dual of a placement of the output,
each rank sends it back through its own operation, and what comes out at each input must be laid out by the dual of that
input's placement. This tells `replicate` from `copy`, whose values are equal, and refuses an operation that mixes them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from hp_plugin.core.dtensor.placement import AxisPlacement
from hp_plugin.core.dtensor.validation.arrangement import (
    Placing,
    block_candidates,
    by_value,
    candidates,
)
from hp_plugin.core.dtensor.validation.calls import apart, gradients
from hp_plugin.core.dtensor.validation.compare import Scale, Wrong, first_wrong, is_equal, largest
from hp_plugin.core.dtensor.validation.exchange import Exchange
from hp_plugin.core.dtensor.validation.reference import OperationRecord
from hp_plugin.core.dtensor.validation.report import Finding, FindingKind, PlacementError

Repeat = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]


@dataclass
class Cell:
    """The placements that a tensor may have; later uses may narrow them down.

    Attributes:
        placings: at least one.
        version: of the tensor when this was found.
    """

    placings: list[Placing]
    version: int = 0

    def hints(self) -> list[AxisPlacement]:
        """Shards among them."""
        return [p for placing in self.placings for p in placing if p.is_shard]


@dataclass(frozen=True)
class Site:
    """Where an operation is.

    Attributes:
        module: path of the module.
        op: its name.
        kinds: of a finding of a wrong value, and of a wrong gradient.
        expected: of its outputs, where a rule or the plan says so.
        names: of its outputs, for messages.
        inputs: names of its differentiable inputs.
    """

    module: str
    op: str
    kinds: tuple[FindingKind, FindingKind] = ("value", "gradient")
    expected: tuple[Placing | None, ...] = ()
    names: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def output(self, index: int) -> str:
        """Name of an output."""
        return self.names[index] if index < len(self.names) else f"output {index}"

    def input(self, index: int) -> str:
        """Name of a differentiable input."""
        return self.inputs[index] if index < len(self.inputs) else f"input {index}"

    def wanted(self, index: int) -> Placing | None:
        """What an output should be."""
        return self.expected[index] if index < len(self.expected) else None


@dataclass
class Checker:
    """The checks, as one rank makes them. Every rank must make the same ones."""

    exchange: Exchange
    _weights: dict[int, list[float]] = field(default_factory=dict)

    def gather(self, label: str, value: object) -> list[object]:
        """Values of all ranks, which must be at the same place.

        Raises:
            PlacementError: they are not, or one of them has found a fault that only it can see.
        """
        received = self.exchange.gather((label, value))
        for found in received:
            if isinstance(found[1], Finding):
                raise PlacementError(found[1])
        labels = [found[0] for found in received]
        if len(set(labels)) > 1:
            rank = next(i for i, other in enumerate(labels) if other != labels[0])
            module, _, op = labels[0].partition("|")
            raise PlacementError(
                Finding(
                    "structure",
                    module,
                    op,
                    axis=", ".join(self.exchange.grid.divided),
                    rank=rank,
                    reason=f"Rank 0 is at {labels[0]!r}, rank {rank} at {labels[rank]!r}: ranks run different "
                    "operations. Name the module in `regions` if they are meant to.",
                )
            )
        return [found[1] for found in received]

    def fail(self, finding: Finding) -> NoReturn:
        """Raises a fault that this rank may be alone to see, and tells the others of it where they listen.

        A rank that waits for this one in a collective of the model does not listen; it is woken up by what started it.
        """
        with contextlib.suppress(threading.BrokenBarrierError):
            self.exchange.tell(("", finding))
        raise PlacementError(finding)

    # ---------------------------------------------------------------- values

    def by_value(
        self,
        site: Site,
        outputs: Sequence[torch.Tensor],
        wholes: Sequence[torch.Tensor],
        scale: Scale,
        hints: Sequence[AxisPlacement] = (),
    ) -> list[list[Placing]]:
        """For each output all placings, by value, that explain it on all ranks; empty where none does."""
        grid = self.exchange.grid
        mine: list[dict[Placing, bool | None]] = []
        for output, whole in zip(outputs, wholes, strict=True):
            size = largest(whole)
            known: dict[Placing, bool | None] = {}
            for placing in candidates(grid, whole.shape, output.shape, hints):
                is_sum = any(p.kind == "partial" for p in placing)
                known[placing] = None if is_sum else is_equal(output, grid.cut(whole, placing), scale, size)
            mine.append(known)
        everyone = self.gather(f"{site.module}|{site.op}", mine)
        agreed = [[known[index] for known in everyone] for index in range(len(outputs))]  # type: ignore[index]
        result = [[p for p in known[0] if all(other.get(p) for other in known)] for known in agreed]
        for index, whole in enumerate(wholes):
            sums = [p for p in agreed[index][0] if all(other.get(p, False) is None for other in agreed[index])]
            wanted = site.wanted(index)
            if result[index] and largest(whole) > 0:
                # Its sum over ranks is another number, unless rounding is as large as the number itself.
                sums = [p for p in sums if wanted is not None and p == by_value(wanted)]
            if sums:
                result[index] += self._sums(site, outputs[index], whole, sums, scale)
            if not result[index]:
                result[index] = self._blocks(site, outputs[index], whole, scale)
        return result

    def _sums(
        self, site: Site, output: torch.Tensor, whole: torch.Tensor, placings: list[Placing], scale: Scale
    ) -> list[Placing]:
        if not output.is_floating_point():
            return []
        grid = self.exchange.grid
        parts: list[torch.Tensor] = self.gather(f"{site.module}|{site.op} sum", output.detach())  # type: ignore[assignment]
        size = max(largest(whole), *(largest(part) for part in parts))
        verdicts = {}
        for placing in placings:
            summands = [parts[i] for i in grid.along(placing, "partial")]
            fits = all(part.shape == output.shape for part in summands)
            verdicts[placing] = fits and is_equal(_added(summands), grid.cut(whole, placing), scale, size)
        return self._everywhere(site, verdicts)

    def _blocks(self, site: Site, output: torch.Tensor, whole: torch.Tensor, scale: Scale) -> list[Placing]:
        grid, size = self.exchange.grid, largest(whole)
        verdicts = {}
        for placing in block_candidates(grid, whole.shape, output.shape):
            verdicts[placing] = is_equal(output, grid.cut(whole, placing), scale, size)
            if verdicts[placing]:
                break
        return self._everywhere(site, verdicts)

    def _everywhere(self, site: Site, verdicts: dict[Placing, bool]) -> list[Placing]:
        everyone: list[dict[Placing, bool]] = self.gather(f"{site.module}|{site.op} all", verdicts)  # type: ignore[assignment]
        return [p for p in everyone[0] if all(other.get(p) for other in everyone)]

    # ---------------------------------------------------------------- gradients

    def by_gradient(
        self,
        site: Site,
        record: OperationRecord,
        placings: list[list[Placing]],
        cells: list[Cell],
        repeat: Repeat,
        scale: Scale,
    ) -> list[list[Placing]]:
        """Of the placings of each output those whose gradient comes back as the inputs' placings say.

        Args:
            site: where.
            record: what one process computes.
            placings: for each output those to be tried.
            cells: of the differentiable inputs; narrowed down.
            repeat: runs the operation again; returns outputs and leaves.
            scale: of the values.

        Raises:
            PlacementError: none is left for some output.
        """
        trials: list[tuple[int, Placing, list[torch.Tensor]]] = []
        with apart():
            outputs, leaves = repeat()
            for index, cotangent in enumerate(record.cotangents):
                if cotangent is None or not leaves:
                    continue
                if not outputs[index].requires_grad:
                    self.fail(self._cut_off(site, index))
                for placing in placings[index]:
                    given = self._laid_out(cotangent, placing)
                    trials.append((index, placing, gradients(outputs, leaves, index, given)))
        if not trials:
            return placings
        verdicts = self._judge(site, record, cells, trials, scale)
        result: list[list[Placing]] = []
        allowed: list[set[Placing]] = [set() for _ in cells]
        for index, found in enumerate(placings):
            mine = [(n, trial[1]) for n, trial in enumerate(trials) if trial[0] == index]
            if not mine:
                result.append(found)
                continue
            viable = [(n, p) for n, p in mine if all(verdicts[n, i] for i in range(len(cells)))]
            if not viable:
                self._report_gradient(site, record, cells, [(n, trials[n]) for n, _ in mine], verdicts, scale)
            result.append([p for _, p in viable])
            for n, _ in viable:
                for i, passed in enumerate(allowed):
                    passed.update(verdicts[n, i])
        for cell, passed in zip(cells, allowed, strict=True):
            cell.placings = [p for p in cell.placings if p in passed] or cell.placings
        return result

    def _laid_out(self, cotangent: torch.Tensor, placing: Placing) -> torch.Tensor:
        """This rank's part of a gradient of an output placed so: a piece, all of it, or a summand."""
        grid = self.exchange.grid
        part = grid.cut(cotangent, placing)
        ranks = grid.along(placing, "copy")
        if len(ranks) > 1:
            part = part * self._shares(len(ranks))[ranks.index(grid.index)]
        return part.contiguous()

    def _shares(self, count: int) -> list[float]:
        """Different numbers that add up to 1."""
        if count not in self._weights:
            drawn = torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64) + 0.1
            self._weights[count] = (drawn / drawn.sum()).tolist()
        return self._weights[count]

    def _judge(
        self,
        site: Site,
        record: OperationRecord,
        cells: list[Cell],
        trials: list[tuple[int, Placing, list[torch.Tensor]]],
        scale: Scale,
    ) -> dict[tuple[int, int], list[Placing]]:
        """Trial and input -> placings of the input that what came back agrees with, on all ranks."""
        grid = self.exchange.grid
        summed = {i for i, cell in enumerate(cells) if any(p.kind == "copy" for t in cell.placings for p in t)}
        parts: list[dict[tuple[int, int], torch.Tensor]] = []
        if summed:
            mine = {(n, i): trial[2][i] for n, trial in enumerate(trials) for i in summed}
            parts = self.gather(f"{site.module}|{site.op} gradients", mine)  # type: ignore[assignment]
        verdicts: dict[tuple[int, int], list[Placing]] = {}
        for n, (index, _, found) in enumerate(trials):
            for i, cell in enumerate(cells):
                whole = record.gradients[index][i]
                size = max(largest(whole), 1e-3)
                passed = []
                for placing in cell.placings:
                    got = found[i]
                    if any(p.kind == "copy" for p in placing):
                        summands = [parts[rank][n, i] for rank in grid.along(placing, "copy")]
                        if any(part.shape != got.shape for part in summands):
                            continue
                        got = _added(summands)
                        size = max(size, *(largest(part) for part in summands))
                    if is_equal(got, grid.cut(whole, placing), scale, size):
                        passed.append(placing)
                verdicts[n, i] = passed
        everyone: list[dict[tuple[int, int], list[Placing]]] = self.gather(  # type: ignore[assignment]
            f"{site.module}|{site.op} verdicts", verdicts
        )
        return {key: [p for p in passed if all(p in v[key] for v in everyone)] for key, passed in everyone[0].items()}

    # ---------------------------------------------------------------- findings

    def report_value(
        self,
        site: Site,
        index: int,
        output: torch.Tensor,
        whole: torch.Tensor,
        scale: Scale,
        found: Sequence[Placing] = (),
        reason: str = "",
    ) -> None:
        """Raises the finding that output `index` does not lie as expected. Every rank must call."""
        grid = self.exchange.grid
        wanted = site.wanted(index)
        options = list(candidates(grid, whole.shape, output.shape))
        guess = by_value(wanted) if wanted is not None else next(iter(options), None)
        wrong: Wrong | None = None
        value, size = output.detach(), largest(whole)
        if guess is not None and grid.fits(whole.shape, guess):
            summands = grid.along(guess, "partial")
            if len(summands) > 1:
                parts: list[torch.Tensor] = self.gather(f"{site.module}|{site.op} report", value)  # type: ignore[assignment]
                if all(parts[i].shape == value.shape for i in summands):
                    value = _added([parts[i] for i in summands])
            wrong = first_wrong(value, whole, grid, guess, scale, size)
        shapes = f"{tuple(output.shape)} on rank {grid.index}, {tuple(whole.shape)} in one process"
        everyone: list[tuple[Wrong | None, str]] = self.gather("report", (wrong, shapes))  # type: ignore[assignment]
        worst = min((w for w, _ in everyone if w is not None), key=lambda w: (w.index, w.rank), default=None)
        if worst is None and not reason and not options:
            reason = f"No placement explains its shape: {everyone[0][1]}."
        raise PlacementError(
            Finding(
                site.kinds[0],
                site.module,
                site.op,
                site.output(index),
                grid.differing(guess, found[0]) if guess is not None and found else ", ".join(grid.divided),
                grid.describe(wanted) if wanted is not None else "any placement",
                " or ".join(grid.describe(p) for p in found) or "none",
                None if worst is None else worst.rank,
                None if worst is None else worst.index,
                None if worst is None else worst.expected,
                None if worst is None else worst.found,
                reason or ("The ranks have something else." if found else "No placement explains what the ranks have."),
            )
        )

    def _cut_off(self, site: Site, index: int) -> Finding:
        return Finding(
            site.kinds[1],
            site.module,
            site.op,
            site.output(index),
            ", ".join(self.exchange.grid.divided),
            "a gradient",
            "none",
            rank=self.exchange.grid.index,
            reason="In one process the output has a gradient, on this rank it has not.",
        )

    def _report_gradient(
        self,
        site: Site,
        record: OperationRecord,
        cells: list[Cell],
        trials: list[tuple[int, tuple[int, Placing, list[torch.Tensor]]]],
        verdicts: dict[tuple[int, int], list[Placing]],
        scale: Scale,
    ) -> None:
        """Raises the finding that a gradient does not come back as an input's placement says."""
        grid = self.exchange.grid
        n, (output, placing, came) = max(trials, key=lambda t: sum(bool(verdicts[t[0], i]) for i in range(len(cells))))
        which = next(i for i in range(len(cells)) if not verdicts[n, i])
        whole = record.gradients[output][which]
        wanted = cells[which].placings[0]
        expected = tuple(p.gradient for p in wanted)
        inner = Site(site.module, site.op, (site.kinds[1], site.kinds[1]), (expected,), (site.input(which),))
        found = self.by_value(inner, [came[which]], [whole], Scale(max(scale.size, 1e-3), scale.length))[0]
        self.report_value(
            Site(
                site.module, site.op, (site.kinds[1], site.kinds[1]), (expected,), (f"gradient of {site.input(which)}",)
            ),
            0,
            came[which],
            whole,
            Scale(max(scale.size, 1e-3), scale.length),
            found,
            f"A random gradient was sent back. The input lies as {grid.describe(wanted)}, the output as "
            f"{grid.describe(placing)}.",
        )


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total
