"""Follows modules: what arrives and leaves, parameters as their bodies use them, and regions that are one operation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor.boundary import output_key
from hp_plugin.core.dtensor.plan import ModuleSpec
from hp_plugin.core.dtensor.validation.arrangement import Placing, by_value
from hp_plugin.core.dtensor.validation.calls import Call
from hp_plugin.core.dtensor.validation.checker import Cell, Site
from hp_plugin.core.dtensor.validation.compare import Scale
from hp_plugin.core.dtensor.validation.follow import (
    is_region,
    named_inputs,
    named_outputs,
    path_of,
    plain_forward,
    replace_inputs,
    replace_outputs,
)
from hp_plugin.core.dtensor.validation.reference import EnterRecord, LeaveRecord, OperationRecord, Whole
from hp_plugin.core.dtensor.validation.report import FindingKind
from hp_plugin.core.dtensor.validation.tracking import Repeated, Tracking

Steps = Sequence[Callable[[torch.Tensor], torch.Tensor]]


class Borders(Tracking):
    """What modules tell of their calls."""

    _generator: torch.Generator

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Follower`: does what the boundary of production does, and checks each of its conversions."""
        if not self.is_following or self._depth:
            return forward(*args, **kwargs)
        name = path_of(module)
        spec = self.plan.modules.get(name, ModuleSpec())
        if is_region(name, spec, self.regions):
            return self._region_of_module(module, name, spec, forward, args, kwargs)
        record = self.take(EnterRecord, name)
        self._modules.append(name)
        boundary = vars(module).get("_hp_boundary")
        steps = {key: made for _, key, made in boundary.inputs} if boundary is not None else {}
        converted = {}
        for key, tensor in named_inputs(module, name, spec, args, kwargs).items():
            entry = spec.inputs[key]
            before, after = (self.grid.placing(p, tensor.ndim) for p in (entry.arrives, entry.needs))
            converted[key] = self._convert(
                f"input {key}", "input", tensor, record.inputs[key], before, after, steps.get(key, ())
            )
        args, kwargs = replace_inputs(module, name, spec, args, kwargs, converted)
        with self._parameters_in_use(module, name, dict(boundary.parameters) if boundary is not None else {}):
            result = plain_forward(module, forward)(*args, **kwargs)
        leaving = self.take(LeaveRecord, name)
        made = dict(boundary.outputs) if boundary is not None else {}
        outputs = {}
        for key, tensor in named_outputs(result, spec).items():
            leaves = spec.outputs[key]
            before, after = (self.grid.placing(p, tensor.ndim) for p in (leaves.produces, leaves.leaves))
            outputs[key] = self._convert(
                f"output {key}", "output", tensor, leaving.outputs[key], before, after, made.get(output_key(key), ())
            )
        result = replace_outputs(result, spec, outputs)
        self._modules.pop()
        return result

    def _convert(
        self,
        what: str,
        kind: FindingKind,
        tensor: torch.Tensor,
        whole: Whole,
        before: Placing,
        after: Placing,
        steps: Steps,
        mean_over: int = 1,
    ) -> torch.Tensor:
        """A boundary's work on one tensor, checked before and after. Its gradient is divided by `mean_over`."""
        site = replace(self.site("boundary"), kinds=(kind, kind), names=(what,), inputs=(what,))
        with self.inside():
            cell = self.cell(tensor, whole, replace(site, expected=(before,)), what)
            flows = tensor.requires_grad and whole.requires_grad
            if kind != "parameter":
                before, after = (self.on_batch_of(p, cell.placings[0]) for p in (before, after))
            fitting = [p for p in cell.placings if p == before or (not flows and by_value(p) == by_value(before))]
            if not fitting:
                self.checker.report_value(
                    replace(site, expected=(before,)),
                    0,
                    tensor,
                    whole.value,
                    Scale.of([], [whole.value]),
                    cell.placings,
                    "The plan expects it so before the boundary converts it.",
                )
            cell.placings = fitting
            if not steps and before == after:
                return tensor
            call = Call.of(lambda x: _run(steps, x), (tensor,), {}, self._snapshots)
            call.run()
            record = OperationRecord("boundary", site.module, [whole], [whole])
            if flows:
                drawn = torch.randn(whole.value.shape, generator=self._generator, dtype=torch.float64)
                cotangent = drawn.to(device=whole.value.device, dtype=whole.value.dtype)
                record.cotangents, record.gradients = [cotangent], [[cotangent / mean_over]]
            cells = [Cell([before], cell.version)] if flows else []
            site = replace(site, expected=(after,))
            self.verify(site, record, call.outputs, cells, call, exact=[after])
            [output] = call.outputs
            if output is not tensor:
                self.keep([output], [whole], [[after]])
            self.log(site, "boundary", [[after]])
        return output

    @contextlib.contextmanager
    def _parameters_in_use(self, module: nn.Module, name: str, steps: Mapping[str, Any]) -> Iterator[None]:
        """The module's own parameters, as its body uses them."""
        parameters: dict[str, Any] = module._parameters
        held = dict(parameters)
        try:
            for attribute, parameter in held.items():
                full = f"{name}.{attribute}" if name else attribute
                if parameter is None:
                    continue
                before = self.held(full, parameter)
                after = self.placing_of(full, self._placed[full].in_use, parameter.ndim)
                self.put(parameter, [before])
                parameters[attribute] = self._convert(
                    f"parameter {attribute}",
                    "parameter",
                    parameter,
                    self.whole_of(full, parameter),
                    before,
                    after,
                    steps.get(attribute, ()),
                    self.mean_over(full, parameter),
                )
            yield
        finally:
            parameters.update(held)

    # ---------------------------------------------------------------- regions

    def _region_of_module(
        self,
        module: nn.Module,
        name: str,
        spec: ModuleSpec,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        parameters = {}
        for relative, parameter in module.named_parameters():
            full = f"{name}.{relative}" if name else relative
            self.put(parameter, [self.held(full, parameter)])
            parameters[full] = parameter
        inputs = named_inputs(module, name, spec, args, kwargs)
        arriving = {id(t): self.grid.placing(spec.inputs[key].arrives, t.ndim) for key, t in inputs.items()}

        def leaving(result: Any) -> list[Placing]:
            named = named_outputs(result, spec)
            return [self.grid.placing(spec.outputs[key].leaves, t.ndim) for key, t in named.items()]

        self._modules.append(name)
        result = self.region("region", forward, args, kwargs, parameters, arriving, leaving)
        self._modules.pop()
        return result

    def region(
        self,
        label: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, nn.Parameter] | None = None,
        arriving: Mapping[int, Placing] | None = None,
        leaving: Callable[[Any], list[Placing]] | None = None,
    ) -> Any:
        """A part that one process does as one operation: compared at its borders only.

        Routing inside is that of one process: the tokens and the choices that arrive have been rounded off to its own.
        """
        parameters = parameters or {}
        with self.inside():
            site = replace(self.site(label), kinds=("output", "gradient"))
            call = Call.of(func, args, kwargs, self._snapshots)
            call.run()
            record = self.take(OperationRecord, label)
            if len(call.outputs) != len(record.outputs):
                self.fail_structure(
                    label, f"It gives {len(call.outputs)} tensors, in one process {len(record.outputs)}."
                )
            cells, names, places = self._arriving(site, call, record, arriving or {})
            used = {n: p for n, p in parameters.items() if p.requires_grad}
            for full, parameter in used.items():
                cells.append(self._cells[parameter])
                names.append(f"parameter {full.removeprefix(site.module + '.')}")
                places.append(record.place_of(self._applied.whole_name(full)))
            record = record.at(places, [1] * (len(places) - len(used)) + [self.mean_over(*u) for u in used.items()])

            def repeat() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
                outputs, leaves = call.repeat()
                return [self._share(label, t) for t in outputs], [*leaves, *used.values()]

            outputs = [self._share(label, t) for t in call.outputs]
            wanted = leaving(call.result) if leaving is not None else []
            exact = wanted if len(wanted) == len(outputs) and not any(self._batch) else []
            site = replace(site, inputs=tuple(names), expected=tuple(exact))
            found = self.verify(site, record, outputs, cells, Repeated(repeat), exact=exact)
            if wanted and not exact:
                self._check_leaving(site, record, outputs, wanted, found)
            if outputs == call.outputs or label != "loss":
                self.keep(call.outputs, record.outputs, found)
            self.log(site, "region", found, record.note)
        return call.result

    def _arriving(
        self, site: Site, call: Call, record: OperationRecord, arriving: Mapping[int, Placing]
    ) -> tuple[list[Cell], list[str], list[int]]:
        """Differentiable inputs of a region: placements, names, and places among those of one process."""
        cells: list[Cell] = []
        names: list[str] = []
        places: list[int] = []
        flowing = [i for i, whole in enumerate(record.inputs[: len(call.inputs)]) if whole.requires_grad]
        for i, tensor in enumerate(call.inputs):
            if i not in flowing or not call.flows[i]:
                continue
            cell = self.cell(tensor, record.inputs[i], site, f"input {i}")
            wanted = arriving.get(id(tensor))
            if wanted is not None:
                fitting = [p for p in cell.placings if p == self.on_batch_of(wanted, p)]
                if not fitting:
                    whole = record.inputs[i].value
                    self.checker.report_value(
                        replace(site, expected=(wanted,), names=(f"input {i}",), kinds=("input", "input")),
                        0,
                        tensor,
                        whole,
                        Scale.of([], [whole]),
                        cell.placings,
                        "The plan expects it so.",
                    )
                cell.placings = fitting
            cells.append(cell)
            names.append(f"input {i}")
            places.append(flowing.index(i))
        return cells, names, places

    def _check_leaving(
        self,
        site: Site,
        record: OperationRecord,
        outputs: Sequence[torch.Tensor],
        wanted: Sequence[Placing],
        found: list[list[Placing]],
    ) -> None:
        """On the axes that the plan's entries speak of, outputs must lie as they say."""
        for index, (placing, placings) in enumerate(zip(wanted, found, strict=False)):
            if not any(self.without_batch(p) == self.without_batch(placing) for p in placings):
                whole = record.outputs[index].value
                site = replace(site, expected=(placing,))
                self.checker.report_value(site, index, outputs[index], whole, Scale.of([], [whole]), placings)

    def _share(self, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of a loss, a mean over this rank's rows, what it contributes to the mean over all of them."""
        count = math.prod(size for size, batch in zip(self.grid.sizes, self._batch, strict=True) if batch)
        return tensor / count if label == "loss" and count > 1 else tensor


def _run(steps: Steps, value: torch.Tensor) -> torch.Tensor:
    for step in steps:
        value = step(value)
    return value
