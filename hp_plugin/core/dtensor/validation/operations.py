"""Follows operations: each output's placement from those of the inputs, with the values of one process at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hp_plugin.core.dtensor.placement import REPLICATE
from hp_plugin.core.dtensor.validation.arrangement import Placing, by_value, candidates
from hp_plugin.core.dtensor.validation.calls import Call, version_of
from hp_plugin.core.dtensor.validation.checker import Cell, Site
from hp_plugin.core.dtensor.validation.randomness import DRAWS, WHOLE_DRAWS, mask_of, replayed_as
from hp_plugin.core.dtensor.validation.reference import OperationRecord, writes_of
from hp_plugin.core.dtensor.validation.report import Finding, PlacementError
from hp_plugin.core.dtensor.validation.rules import predict
from hp_plugin.core.dtensor.validation.tracking import Tracking
from hp_plugin.errors import UnsupportedError


class Operations(Tracking):
    """What `Interceptor` tells of operations."""

    def operation(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, native: bool
    ) -> Any:
        """See `Handler`."""
        if self._depth:
            return func(*args, **kwargs)
        with self.inside():
            ahead = self.peek()
            is_next = isinstance(ahead, OperationRecord) and ahead.name == name
            if isinstance(ahead, OperationRecord) and is_next and ahead.is_random:
                return self._random(name, func, args, kwargs, ahead)
            call = Call.of(func, args, kwargs, self._snapshots)
            known = [self.known(t) for t in call.inputs]
            try:
                call.run(writes_of(func, native=native))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if isinstance(error, PlacementError) or not is_next:
                    raise
                self.fail_structure(name, f"It raised on rank {self.grid.index}: {str(error).splitlines()[0]}")
            if not call.outputs:
                return call.result
            self._check(self.take(OperationRecord, name), call, known, self.site(name), native=native)
        return call.result

    def _check(
        self, record: OperationRecord, call: Call, known: list[Cell | None], site: Site, *, native: bool
    ) -> None:
        if (len(call.inputs), len(call.outputs)) != (len(record.inputs), len(record.outputs)):
            self.fail_structure(
                site.op,
                f"It takes {len(call.inputs)} tensors and gives {len(call.outputs)}; in one process it takes "
                f"{len(record.inputs)} and gives {len(record.outputs)}.",
            )
        cells: dict[int, Cell] = {}
        for i, tensor in enumerate(call.inputs):
            if call.flows[i] and record.inputs[i].requires_grad:
                cell = known[i] or self.inferred(call.before[i], record.inputs[i], site, f"input {i}", flows=True)
                if known[i] is None and i not in call.mutated:
                    self._cells[tensor] = Cell(cell.placings, version_of(tensor))
                    cell = self._cells[tensor]
                cells[i] = cell
        rule = predict(site.op, call, [cells.get(i, cell) for i, cell in enumerate(known)], record, self.grid)
        site = replace(site, expected=tuple(rule or ()), inputs=tuple(f"input {i}" for i in cells))
        found = self.verify(site, record, call.outputs, list(cells.values()), call, native=native)
        how = "value"
        if rule is not None:
            agreed = [p for p, f in zip(rule, found, strict=True) if p is not None and p in f]
            if len(agreed) == len(found):
                found, how = [[p] for p in agreed], "rule"
        self.keep(call.outputs, record.outputs, found)
        self.log(site, how, found, record.note)

    # ---------------------------------------------------------------- random numbers

    def _random(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ahead: OperationRecord
    ) -> Any:
        """Draws as the model would, checks that ranks draw alike that should, and goes on with the recorded numbers."""
        site = self.site(name)
        if ahead.mask is None and name not in DRAWS:
            raise UnsupportedError(
                f"module {site.module or '(model)'}: {name} draws random numbers inside, which cannot be replayed; set "
                "its dropout to 0, call .eval(), or use torch.nn.functional.dropout."
            )
        with self.exchange.random_numbers():
            drawn = func(*args, **kwargs) if ahead.mask is None else mask_of(name, args, kwargs)
        record = self.take(OperationRecord, name)
        if not isinstance(drawn, torch.Tensor):
            self.fail_structure(name, "It draws random numbers in one process, and not on this rank.")
        assert isinstance(drawn, torch.Tensor)
        if ahead.mask is not None:
            template = args[0] if args else kwargs["input"]
            placing = self.cell(template, record.inputs[0], site, "input 0").placings[0]
            self._check_draws(site, drawn, placing)
            piece = self.grid.cut(ahead.mask, by_value(placing)).clone()
            call = Call.of(*replayed_as(name, args, kwargs, piece), self._snapshots)
            known = [self.known(t) for t in call.inputs]
            call.run()
            self._check(record, call, known, site, native=True)
            self.operations[-1] = replace(self.operations[-1], how="random")
            return call.result
        if drawn.requires_grad:
            raise UnsupportedError(
                f"module {site.module or '(model)'}: {name} writes random numbers into a tensor that has a gradient, "
                "which cannot be replayed; draw them into a tensor of their own."
            )
        placing = self._placing_of_draw(site, drawn, record.outputs[0].value, args)
        self._check_draws(site, drawn, placing)
        drawn.data.copy_(self.grid.cut(record.outputs[0].value, placing))
        self.put(drawn, [placing])
        self.log(site, "random", [[placing]])
        return drawn

    def _placing_of_draw(self, site: Site, drawn: torch.Tensor, whole: torch.Tensor, args: tuple[Any, ...]) -> Placing:
        """By the sizes, and by the tensor that the numbers are to be like."""
        options = [p for p in candidates(self.grid, whole.shape, drawn.shape) if all(q.kind != "partial" for q in p)]
        template = self.known(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if template is not None:
            like = [tuple(p if p.is_shard else REPLICATE for p in t) for t in template.placings]
            options = [p for p in options if p in like] or options
        if not options or (site.op in WHOLE_DRAWS and any(p.is_shard for p in options[0])):
            raise UnsupportedError(
                f"module {site.module or '(model)'}: {site.op} draws numbers of shape {tuple(drawn.shape)}, and of "
                f"{tuple(whole.shape)} in one process, of which no piece can be taken; draw them outside of the model."
            )
        return options[0]

    def _check_draws(self, site: Site, drawn: torch.Tensor, placing: Placing) -> None:
        """Ranks that differ only on axes which do not divide the tensor hold one value, and must draw the same."""
        axes = [i for i, p in enumerate(placing) if not p.is_shard]
        everyone: list[Any] = self.checker.gather(f"{site.module}|{site.op} draws", drawn.detach().clone())
        coordinates = self.grid.coordinates
        for index, other in enumerate(coordinates):
            first = everyone[coordinates.index(tuple(0 if i in axes else at for i, at in enumerate(other)))]
            if first.shape != everyone[index].shape or not torch.equal(first, everyone[index]):
                apart = [a for i, a in enumerate(self.grid.axes) if i in axes and other[i]]
                raise PlacementError(
                    Finding(
                        "random",
                        site.module,
                        site.op,
                        axis=", ".join(apart),
                        expected="the same random numbers",
                        found="different ones",
                        rank=index,
                        reason="This axis does not divide the tensor, so its ranks must draw alike; seed them alike.",
                    )
                )
