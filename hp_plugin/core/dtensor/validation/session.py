"""Follows a planned model on one rank: operation by operation along the record of one process, module by module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hp_plugin.core.dtensor.applied import AppliedPlan
from hp_plugin.core.dtensor.boundary import output_key
from hp_plugin.core.dtensor.plan import ModuleSpec, ParameterSpec, Placed
from hp_plugin.core.dtensor.tolerance import FLOOR
from hp_plugin.core.dtensor.validation.arrangement import Grid, Placing, by_value, with_gradients
from hp_plugin.core.dtensor.validation.calls import Call, Snapshots, intercepted, version_of
from hp_plugin.core.dtensor.validation.checker import Cell, Checker, Repeat, Site
from hp_plugin.core.dtensor.validation.compare import Scale
from hp_plugin.core.dtensor.validation.exchange import Exchange
from hp_plugin.core.dtensor.validation.follow import (
    is_region,
    named_inputs,
    named_outputs,
    path_of,
    plain_forward,
    replace_inputs,
    replace_outputs,
)
from hp_plugin.core.dtensor.validation.randomness import DRAWS, WHOLE_DRAWS, mask_of, replayed_as
from hp_plugin.core.dtensor.validation.reference import (
    EnterRecord,
    LeaveRecord,
    OperationRecord,
    Record,
    Whole,
    writes_of,
)
from hp_plugin.core.dtensor.validation.report import Finding, FindingKind, Operation, PlacementError
from hp_plugin.core.dtensor.validation.rules import predict
from hp_plugin.errors import UnsupportedError


class Session:
    """One rank of a planned model that is followed.

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
        self._model = model
        self._weights = weights
        self._placed = applied.plan.placed_parameters()
        self._cells = WeakTensorKeyDictionary()
        self._snapshots = Snapshots()
        self._records: list[Record] = []
        self._cursor = 0
        self._modules: list[str] = []
        self._depth = 0
        self._generator = torch.Generator()
        self._longest = 1
        self.is_following = False
        self.parameters_compared = 0

    @property
    def grid(self) -> Grid:
        """The plan's axes as this rank sees them."""
        return self.exchange.grid

    @contextlib.contextmanager
    def following(self, records: list[Record]) -> Iterator[None]:
        """While it lasts, what this thread runs is compared with `records`. Every rank must enter."""
        self._records, self._cursor, self.is_following, self.operations = records, 0, True, []
        self._modules = []
        self._generator.manual_seed(0)
        try:
            self._check_parameters()
            with intercepted(self):
                yield
            if self._cursor != len(self._records):
                left = self._records[self._cursor]
                self._structure("", f"One process goes on with {_describe(left)}, this rank has finished.")
            self.checker.gather("|end", None)
        except PlacementError:
            raise
        except Exception as error:
            # The others wait for this rank.
            with contextlib.suppress(Exception):
                self.checker.fail(self._finding("structure", "", f"Rank {self.grid.index} raised {error!r}."))
            raise
        finally:
            self.is_following = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        raise UnsupportedError(
            "a model in validation mode cannot be copied: it is tied to the run that it is compared with; copy the "
            "model before the plan is applied."
        )

    # ---------------------------------------------------------------- operations

    def operation(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, native: bool
    ) -> Any:
        """See `Handler`."""
        if self._depth:
            return func(*args, **kwargs)
        with self._inside():
            ahead = self._records[self._cursor] if self._cursor < len(self._records) else None
            if isinstance(ahead, OperationRecord) and ahead.is_random and ahead.name == name:
                return self._random(name, func, args, kwargs, ahead)
            call = Call.of(func, args, kwargs, self._snapshots)
            known = [self._known(t) for t in call.inputs]
            try:
                call.run(writes_of(func, native=native))
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if isinstance(error, PlacementError) or not isinstance(ahead, OperationRecord) or ahead.name != name:
                    raise
                self._structure(name, f"It raised on rank {self.grid.index}: {str(error).splitlines()[0]}")
            if not call.outputs:
                return call.result
            record = self._take(OperationRecord, name)
            self._check(record, call, known, self._site(name), native=native)
        return call.result

    def _check(
        self, record: OperationRecord, call: Call, known: list[Cell | None], site: Site, *, native: bool
    ) -> None:
        if (len(call.inputs), len(call.outputs)) != (len(record.inputs), len(record.outputs)):
            self._structure(
                site.op,
                f"It takes {len(call.inputs)} tensors and gives {len(call.outputs)}; in one process it takes "
                f"{len(record.inputs)} and gives {len(record.outputs)}.",
            )
        cells = {
            i: known[i] or self._inferred(call.before[i], record.inputs[i], site, f"input {i}", flows=True)
            for i, flows in enumerate(call.flows)
            if flows and record.inputs[i].requires_grad
        }
        rule = predict(site.op, call, known, record, self.grid)
        site = replace(site, expected=tuple(rule or ()), inputs=tuple(f"input {i}" for i in cells))
        found = self._verify(site, record, call.outputs, list(cells.values()), call, native=native)
        how = "value"
        if rule is not None:
            agreed = [p for p, f in zip(rule, found, strict=True) if p is not None and p in f]
            if len(agreed) == len(found):
                found, how = [[p] for p in agreed], "rule"
        self._keep(call.outputs, record.outputs, found)
        self._log(site, how, found, record.note)

    def _verify(
        self,
        site: Site,
        record: OperationRecord,
        outputs: list[torch.Tensor],
        cells: list[Cell],
        call: Any,
        *,
        native: bool = False,
        exact: Sequence[Placing] = (),
    ) -> list[list[Placing]]:
        """Both checks; returns the placings of each output. `exact`: what they must be."""
        wholes = [whole.value for whole in record.outputs]
        scale = Scale.of([whole.value for whole in record.inputs], wholes)
        self._longest = max(self._longest, scale.length)
        hints = [hint for cell in cells for hint in cell.hints()] + [p for t in exact for p in t if p.is_shard]
        found = self.checker.by_value(site, outputs, wholes, scale, hints)
        for index, output in enumerate(outputs):
            if not found[index] or (exact and by_value(exact[index]) not in found[index]):
                self.checker.report_value(site, index, output, wholes[index], scale, found[index])
        followed = [i for i, whole in enumerate(record.outputs) if whole.requires_grad]
        wide = [
            [exact[i]] if exact else [t for p in f for t in with_gradients(p, self.grid.sizes)] if i in followed else f
            for i, f in enumerate(found)
        ]
        if not followed or not record.gradients:
            return wide
        whole = tuple(self.grid.placing({}, 0))
        if native and all(cell.placings == [whole] for cell in cells) and all(whole in f for f in found):
            return [[whole] for _ in found]
        return self.checker.by_gradient(site, record, wide, cells, call.repeat, scale)

    def _random(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ahead: OperationRecord
    ) -> Any:
        """Draws as the model would, looks whether ranks draw alike that should, and goes on with one process's numbers."""
        site = self._site(name)
        if ahead.mask is None and name not in DRAWS:
            raise UnsupportedError(
                f"module {site.module or '(model)'}: {name} draws random numbers inside, which cannot be replayed; set "
                "its dropout to 0, call .eval(), or name the module's parent in no region and use F.dropout."
            )
        with self.exchange.random_numbers():
            if ahead.mask is not None:
                drawn = mask_of(name, args, kwargs)
            else:
                drawn = func(*args, **kwargs)
        record = self._take(OperationRecord, name)
        if not isinstance(drawn, torch.Tensor):
            self._structure(name, "It draws random numbers in one process, and not on this rank.")
        if ahead.mask is not None:
            wanted = ahead.mask
            template = args[0] if args else kwargs["input"]
            placing = self._cell(template, record.inputs[0], site, "input 0").placings[0]
        else:
            wanted = record.outputs[0].value
            placing = self._placing_by_shape(site, drawn, wanted, args)
        mine = tuple(i for i, p in enumerate(placing) if not p.is_shard)
        self._same_draws(site, drawn, mine)
        piece = self.grid.cut(wanted, by_value(placing)).clone()
        if ahead.mask is not None:
            call = Call.of(*replayed_as(name, args, kwargs, piece), self._snapshots)
            known = [self._known(t) for t in call.inputs]
            call.run()
            self._check(record, call, known, self._site(name), native=True)
            self.operations[-1] = replace(self.operations[-1], how="random")
            return call.result
        if drawn.requires_grad:
            raise UnsupportedError(f"module {site.module}: {name} has a gradient; replay of it is not supported.")
        drawn.data.copy_(piece)
        placing = tuple(p if p.is_shard else by_value((p,))[0] for p in placing)
        self._keep([drawn], record.outputs, [[placing]])
        self._log(site, "random", [[placing]])
        return drawn

    def _placing_by_shape(self, site: Site, drawn: torch.Tensor, whole: torch.Tensor, args: tuple[Any, ...]) -> Placing:
        from hp_plugin.core.dtensor.placement import REPLICATE
        from hp_plugin.core.dtensor.validation.arrangement import candidates

        options = [p for p in candidates(self.grid, whole.shape, drawn.shape) if all(q.kind != "partial" for q in p)]
        template = self._known(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if template is not None:
            kept = [tuple(p if p.is_shard else REPLICATE for p in t) for t in template.placings]
            options = [p for p in options if p in kept] or options
        if not options or (site.op in WHOLE_DRAWS and any(p.is_shard for p in options[0])):
            raise UnsupportedError(
                f"module {site.module or '(model)'}: {site.op} draws numbers of shape {tuple(drawn.shape)}, "
                f"{tuple(whole.shape)} in one process, and no piece of those can be taken; draw them outside of the model."
            )
        return options[0]

    def _same_draws(self, site: Site, drawn: torch.Tensor, axes: tuple[int, ...]) -> None:
        """Ranks that differ only on `axes` hold one value, and must draw the same."""
        everyone: list[Any] = self.checker.gather(f"{site.module}|{site.op} draws", drawn.detach().clone())
        for index, other in enumerate(self.grid.coordinates):
            peer = tuple(0 if i in axes else at for i, at in enumerate(other))
            first = everyone[self.grid.coordinates.index(peer)]
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
                        reason="The tensor is not divided over this axis, so its ranks must draw alike: seed them alike.",
                    )
                )

    # ---------------------------------------------------------------- modules

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One call of a module; `forward` is that of production."""
        if not self.is_following or self._depth:
            return forward(*args, **kwargs)
        name = path_of(module)
        spec = self.plan.modules.get(name, ModuleSpec())
        if is_region(name, spec, self.regions):
            return self._region_module(module, name, spec, forward, args, kwargs)
        record = self._take(EnterRecord, name)
        self._modules.append(name)
        boundary = vars(module).get("_hp_boundary")
        steps = {key: s for _, key, s in boundary.inputs} if boundary is not None else {}
        inputs = named_inputs(module, name, spec, args, kwargs)
        converted = {
            key: self._convert(f"input {key}", "input", tensor, record.inputs[key], spec.inputs[key].arrives,
                               spec.inputs[key].needs, steps.get(key, ()))
            for key, tensor in inputs.items()
        }  # fmt: skip
        args, kwargs = replace_inputs(module, name, spec, args, kwargs, converted)
        with self._parameters_in_use(module, name, dict(boundary.parameters) if boundary is not None else {}):
            result = plain_forward(module, forward)(*args, **kwargs)
        leaving = self._take(LeaveRecord, name)
        made = dict(boundary.outputs) if boundary is not None else {}
        outputs = {}
        for key, tensor in named_outputs(result, spec).items():
            entry = spec.outputs[key]
            outputs[key] = self._convert(
                f"output {key}", "output", tensor, leaving.outputs[key], entry.produces, entry.leaves,
                made.get(output_key(key), ()),
            )  # fmt: skip
        result = replace_outputs(result, spec, outputs)
        self._modules.pop()
        return result

    def _convert(
        self,
        what: str,
        kind: FindingKind,
        tensor: torch.Tensor,
        whole: Whole,
        before: Placed,
        after: Placed,
        steps: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> torch.Tensor:
        """A boundary's work on one tensor, checked before and after."""
        one, other = self.grid.placing(before, tensor.ndim), self.grid.placing(after, tensor.ndim)
        site = replace(self._site("boundary"), kinds=(kind, kind), names=(what,), inputs=(what,))
        with self._inside():
            cell = self._cell(tensor, whole, replace(site, expected=(one,)), what)
            flows = tensor.requires_grad and whole.requires_grad
            fitting = [p for p in cell.placings if p == one or (not flows and by_value(p) == by_value(one))]
            if not fitting:
                scale = Scale.of([], [whole.value])
                self.checker.report_value(
                    replace(site, expected=(one,)), 0, tensor, whole.value, scale, cell.placings,
                    "The plan expects it so before the boundary converts it.",
                )  # fmt: skip
            cell.placings = fitting
            if not steps and one == other:
                return tensor
            call = Call.of(lambda x: _run(steps, x), (tensor,), {}, self._snapshots)
            call.run()
            record = OperationRecord("boundary", site.module, [whole], [whole])
            if flows:
                drawn = torch.randn(whole.value.shape, generator=self._generator, dtype=torch.float64)
                record.cotangents = [drawn.to(device=whole.value.device, dtype=whole.value.dtype)]
                record.gradients = [[record.cotangents[0]]]  # type: ignore[list-item]
            cells = [Cell([one], cell.version)] if flows else []
            site = replace(site, expected=(other,))
            self._verify(site, record, call.outputs, cells, call, exact=[other])
            [output] = call.outputs
            if output is not tensor:
                self._keep([output], [whole], [[other]])
            self._log(site, "boundary", [[other]])
        return output

    @contextlib.contextmanager
    def _parameters_in_use(self, module: nn.Module, name: str, steps: Mapping[str, Any]) -> Iterator[None]:
        """The module's own parameters, as its body uses them."""
        parameters: dict[str, Any] = module._parameters
        held = dict(parameters)
        try:
            for attribute, parameter in held.items():
                full = f"{name}.{attribute}" if name else attribute
                entry = self._placed.get(full)
                if parameter is None or entry is None:
                    continue
                whole = Whole(self._weights[full], parameter.requires_grad)
                self._set(parameter, [self._held(entry, parameter)])
                parameters[attribute] = self._convert(
                    f"parameter {attribute}", "parameter", parameter, whole, entry.held, entry.in_use,
                    steps.get(attribute, ()),
                )  # fmt: skip
            yield
        finally:
            parameters.update(held)

    def _held(self, entry: ParameterSpec, parameter: torch.Tensor) -> Placing:
        return self.grid.placing(entry.held, parameter.ndim)

    def _region_module(
        self,
        module: nn.Module,
        name: str,
        spec: ModuleSpec,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        parameters = []
        for relative, parameter in module.named_parameters():
            full = f"{name}.{relative}" if name else relative
            self._set(parameter, [self._held(self._placed[full], parameter)])
            parameters.append((f"parameter {relative}", parameter))
        inputs = named_inputs(module, name, spec, args, kwargs)
        arriving = {id(t): self.grid.placing(spec.inputs[key].arrives, t.ndim) for key, t in inputs.items()}
        leaving: list[Placing] = []
        self._modules.append(name)
        result = self.region("region", forward, args, kwargs, parameters, arriving, leaving, spec)
        self._modules.pop()
        return result

    def region(
        self,
        label: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[tuple[str, nn.Parameter]] = (),
        arriving: Mapping[int, Placing] | None = None,
        expected: Sequence[Placing] = (),
        spec: ModuleSpec | None = None,
    ) -> Any:
        """A part that one process does as one operation: compared at its borders only."""
        with self._inside():
            site = replace(self._site(label), kinds=("output", "gradient"))
            call = Call.of(func, args, kwargs, self._snapshots)
            call.run()
            record = self._take(OperationRecord, label)
            if (len(call.inputs) + len(parameters), len(call.outputs)) != (len(record.inputs), len(record.outputs)):
                self._structure(label, "It takes or gives another number of tensors than in one process.")
            wholes = record.inputs
            cells: list[Cell] = []
            names: list[str] = []
            for i, tensor in enumerate(call.inputs):
                if tensor.requires_grad and wholes[i].requires_grad:
                    cell = self._cell(tensor, wholes[i], site, f"input {i}")
                    wanted = (arriving or {}).get(id(tensor))
                    if wanted is not None:
                        if wanted not in cell.placings:
                            self.checker.report_value(
                                replace(site, expected=(wanted,), names=(f"input {i}",), kinds=("input", "input")), 0,
                                tensor, wholes[i].value, Scale.of([], [wholes[i].value]), cell.placings,
                                "The plan expects it so.",
                            )  # fmt: skip
                        cell.placings = [wanted]
                    cells.append(cell)
                    names.append(f"input {i}")
            used = [(n, p) for n, p in parameters if p.requires_grad]
            cells += [self._cells[p] for _, p in used]
            names += [n for n, _ in used]

            def repeat() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
                outputs, leaves = call.repeat()
                return outputs, [*leaves, *(p for _, p in used)]

            exact = list(expected)
            if spec is not None:
                made = named_outputs(call.result, spec)
                if len(made) == len(call.outputs):
                    exact = [self.grid.placing(spec.outputs[key].leaves, t.ndim) for key, t in made.items()]
            found = self._verify(
                replace(site, inputs=tuple(names), expected=tuple(exact)), record, call.outputs, cells,
                _Repeated(repeat), exact=exact,
            )  # fmt: skip
            self._keep(call.outputs, record.outputs, found)
            self._log(site, "region", found, record.note)
        return call.result

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See `Follower`: the loss is one operation, as divided logits are added up inside of it."""

        def followed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.is_following or self._depth:
                return function(*args, **kwargs)
            result: torch.Tensor = self.region("loss", function, args, kwargs)
            return result

        return followed

    def check_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Compares the gradients of the parameters with those of one process. Every rank must call.

        Raises:
            PlacementError: for the first one, in the order of the model, that is not laid out as the parameter is held.
        """
        floor = FLOOR * sum(float(g.double().square().sum()) for g in gradients.values() if g is not None) ** 0.5
        for name, parameter in self._model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            placing = self._held(self._placed[name], parameter)
            site = Site(
                owner, "backward", ("parameter_gradient",) * 2, (placing,), (f"gradient of parameter {attribute}",)
            )  # type: ignore[arg-type]
            whole = gradients[name]
            missing = (whole is None) != (parameter.grad is None)
            if any(self.checker.gather(f"{owner}|{attribute} gradient", missing)):
                self.checker.fail(
                    replace(
                        self._finding("parameter_gradient", "backward", "Only one process, or only a rank, has one."),
                        module=owner, tensor=f"gradient of parameter {attribute}",
                    )
                )  # fmt: skip
            if whole is None or parameter.grad is None:
                continue
            scale = Scale(floor, self._longest, is_chain=True)
            [found] = self.checker.by_value(site, [parameter.grad], [whole], scale, list(placing))
            if by_value(placing) not in found:
                self.checker.report_value(site, 0, parameter.grad, whole, scale, found)
            self.parameters_compared += 1

    def assemble(self, tensor: torch.Tensor, placing: Placing) -> torch.Tensor:
        """The whole tensor of which every rank has what `placing` gives it. Every rank must call."""
        whole = tensor.detach()
        for axis in reversed(range(len(placing))):
            parts: list[Any] = self.checker.gather("|assemble", whole)
            mine = [parts[i] for i in self._line(axis)]
            if placing[axis].is_shard:
                blocks = [part.chunk(placing[axis].blocks, placing[axis].dim) for part in mine]
                whole = torch.cat([b for pieces in zip(*blocks, strict=True) for b in pieces], placing[axis].dim)
            elif placing[axis].kind == "partial":
                whole = torch.stack(mine).sum(0)
        return whole.requires_grad_(tensor.requires_grad)

    def _line(self, axis: int) -> list[int]:
        here = self.grid.coordinate
        return [
            i
            for i, other in enumerate(self.grid.coordinates)
            if all(a == b for n, (a, b) in enumerate(zip(other, here, strict=True)) if n != axis)
        ]

    # ---------------------------------------------------------------- placements of tensors

    def _known(self, tensor: torch.Tensor) -> Cell | None:
        cell: Cell | None = self._cells.get(tensor)
        return cell if cell is not None and cell.version == version_of(tensor) else None

    def _cell(self, tensor: torch.Tensor, whole: Whole, site: Site, what: str) -> Cell:
        """The tensor's placements; found by value where they are not known, or it was written since. On every rank."""
        cell = self._known(tensor)
        if cell is None:
            cell = self._inferred(tensor.detach(), whole, site, what, flows=tensor.requires_grad)
            cell = self._set(tensor, cell.placings)
        return cell

    def _inferred(self, value: torch.Tensor, whole: Whole, site: Site, what: str, *, flows: bool) -> Cell:
        scale = Scale.of([], [whole.value])
        site = replace(site, names=(what,))
        [found] = self.checker.by_value(site, [value], [whole.value], scale)
        if not found:
            self.checker.report_value(site, 0, value, whole.value, scale)
        if flows:
            found = [t for p in found for t in with_gradients(p, self.grid.sizes)]
        return Cell(found)

    def _set(self, tensor: torch.Tensor, placings: list[Placing]) -> Cell:
        cell = Cell(placings, version_of(tensor))
        self._cells[tensor] = cell
        return cell

    def _keep(self, outputs: Sequence[torch.Tensor], wholes: Sequence[Whole], found: list[list[Placing]]) -> None:
        """Notes the outputs' placements, and rounds values off to those of one process.

        Otherwise rounding would add up from operation to operation, and a near tie of experts could be chosen another
        way. Sums that are still divided into summands stay as they are.
        """
        for output, whole, placings in zip(outputs, wholes, found, strict=True):
            self._set(output, placings)
            if any(p.kind == "partial" for p in placings[0]) or not output.is_floating_point():
                continue
            piece = self.grid.cut(whole.value, placings[0])
            overlaps = any(s == 0 and n > 1 for s, n in zip(output.stride(), output.shape, strict=True))
            if not overlaps and not torch.equal(output.detach(), piece):
                output.data.copy_(piece)

    # ---------------------------------------------------------------- helpers

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _site(self, op: str) -> Site:
        return Site(self._modules[-1] if self._modules else "", op)

    def _take(self, kind: type, name: str) -> Any:
        """The next record, which must be this one."""
        record = self._records[self._cursor] if self._cursor < len(self._records) else None
        mine = f"operation {name}" if kind is OperationRecord else f"{_VERB[kind]} module {name or '(model)'}"
        found = (record.name if isinstance(record, OperationRecord) else record.module) if record is not None else None
        if not isinstance(record, kind) or found != name:
            theirs = "the end" if record is None else _describe(record)
            self._structure(
                name if kind is OperationRecord else "call", f"This rank is at {mine}, one process at {theirs}."
            )
        self._cursor += 1
        return record

    def _structure(self, op: str, reason: str) -> None:
        self.checker.fail(self._finding("structure", op, reason))

    def _finding(self, kind: FindingKind, op: str, reason: str) -> Finding:
        site = self._site(op)
        return Finding(kind, site.module, op, axis=", ".join(self.grid.divided), rank=self.grid.index, reason=reason)

    def _log(self, site: Site, how: Any, found: list[list[Placing]], note: str = "") -> None:
        placements = tuple(" or ".join(self.grid.describe(p) for p in placings) for placings in found)
        self.operations.append(Operation(site.module, site.op, how, placements, note))

    def _check_parameters(self) -> None:
        """Every rank holds its piece of the weights of one process."""
        for name, parameter in self._model.named_parameters():
            placing = self._held(self._placed[name], parameter)
            owner, _, attribute = name.rpartition(".")
            site = Site(owner, "parameters", ("parameter", "parameter"), (placing,), (f"parameter {attribute}",))
            whole = self._weights[name]
            scale = Scale.of([], [whole])
            [found] = self.checker.by_value(site, [parameter.detach()], [whole], scale, list(placing))
            if placing not in found:
                self.checker.report_value(site, 0, parameter, whole, scale, found)


class _Repeated:
    """Stands for a call whose repetition also gives parameters."""

    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat


_VERB = {EnterRecord: "entering", LeaveRecord: "leaving"}


def _describe(record: Record) -> str:
    if isinstance(record, OperationRecord):
        return f"operation {record.name} of module {record.module or '(model)'}"
    return f"{_VERB[type(record)]} module {record.module or '(model)'}"


def _run(steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], value: torch.Tensor) -> torch.Tensor:
    for step in steps:
        value = step(value)
    return value
