"""`plan_from_styles`: a sharding plan from the styles that `parallelize_module` of torch takes.

Torch's styles say what is placed how and leave gradients to DTensor. A plan says both, so what a style calls
`Replicate` becomes `copy` where column-parallel products use it: at their own input, or, where a module around them
gathers for all of them (`PrepareModuleInput`), there, once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from hp_plugin.core.dtensor.boundary import argument_names
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.placement import COPY, PARTIAL, REPLICATE, AxisPlacement, shard
from hp_plugin.core.dtensor.plan import InputSpec, ModuleSpec, OutputSpec, ParameterSpec, Placed, ShardingPlan
from hp_plugin.errors import ConfigurationError, UnsupportedError


def plan_from_styles(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    axes: Mapping[str, int],
    *,
    axis: str = "tp",
    logits: Placement | None = None,
    divides: Mapping[str, Iterable[str]] | None = None,
) -> ShardingPlan:
    """The plan that `parallelize_module(model, mesh[axis], styles)` describes.

    Args:
        model: the whole model.
        styles: module name, each part of which may be a pattern, -> `ColwiseParallel` and `RowwiseParallel` of
            `nn.Linear` and `nn.Embedding`, `SequenceParallel`, `PrepareModuleInput`, `PrepareModuleOutput`.
        axes: mesh axis -> number of ranks.
        axis: the axis that the styles are for.
        logits: how what the model returns is placed, `Shard(-1)` for `loss_function`; None is `Replicate()`.
        divides: module name or pattern -> integers that count its heads. Not needed where views use -1.

    Raises:
        ConfigurationError: a name that matches no module, two styles for one module, or what `check_plan` refuses.
        UnsupportedError: another style, `Partial`, or a parameter without a style beside column- and row-parallel
            products: its gradient may be a partial sum, which torch's own styles do not sum either.
    """
    maker = _Maker(model, axis, _matched(model, styles))
    entries = maker.entries()
    for name, attributes in _matched(model, divides or {}).items():
        entries[name] = entries.get(name, ModuleSpec()).model_copy(update={"divides": dict.fromkeys(attributes, axis)})
    if logits is not None:
        placed = maker.on(_converted(logits, "logits"))
        entries[""] = ModuleSpec(outputs={"first": OutputSpec(produces=placed, leaves=placed)})
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name in entries]
    plan = ShardingPlan(axes=dict(axes), modules={name: entries[name] for name in names})
    check_plan(model, plan)
    return plan


def _matched(model: nn.Module, by_pattern: Mapping[str, Any]) -> dict[str, Any]:
    """Module name -> value; a pattern is matched part by part, as torch does."""
    found: dict[str, Any] = {}
    for pattern, value in by_pattern.items():
        parts = pattern.split(".") if pattern else []
        hits = [
            name
            for name, _ in model.named_modules(remove_duplicate=False)
            if len(own := name.split(".") if name else []) == len(parts)
            and all(fnmatch.fnmatchcase(one, part) for one, part in zip(own, parts, strict=True))
        ]
        if not hits:
            raise ConfigurationError(f"{pattern!r} matches no module of the model.")
        for name in hits:
            if name in found:
                raise ConfigurationError(f"module {name} is matched twice, the second time by {pattern!r}; keep one.")
            found[name] = value
    return found


def _converted(placement: Placement | None, where: str) -> AxisPlacement:
    if isinstance(placement, Replicate):
        return REPLICATE
    if type(placement) is Shard:
        return shard(placement.dim)
    raise UnsupportedError(f"{where} is placed as {placement!r}; a plan takes Replicate and Shard from styles.")


class _Maker:
    def __init__(self, model: nn.Module, axis: str, styles: dict[str, ParallelStyle]) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.axis = axis
        self.styles = styles
        self.regions = {name for name, style in styles.items() if self._gathers(name, style)}

    def on(self, placement: AxisPlacement) -> Placed:
        return {} if placement == REPLICATE else {self.axis: placement}

    def _gathers(self, name: str, style: ParallelStyle) -> bool:
        """Whether the module passes on a `Replicate` input to column-parallel products inside."""
        columns = [n for n, s in self.styles.items() if type(s) is ColwiseParallel and n.startswith(f"{name}.")]
        if type(style) is not PrepareModuleInput or not columns:
            return False
        desired = [*(style.desired_input_layouts or ()), *style.desired_input_kwarg_layouts.values()]
        return any(isinstance(placement, Replicate) for placement in desired)

    def entries(self) -> dict[str, ModuleSpec]:
        entries = {name: self._entry(name, style) for name, style in self.styles.items()}
        for name, module in self.modules.items():
            own = [key for key, parameter in module._parameters.items() if parameter is not None]
            missing = [key for key in own if name not in entries or key not in entries[name].parameters]
            if missing:
                used = self._use_without_style(name)
                spec = entries.get(name, ModuleSpec())
                whole = {key: ParameterSpec(used=used) for key in missing}
                entries[name] = spec.model_copy(update={"parameters": {**spec.parameters, **whole}})
        return entries

    def _use_without_style(self, name: str) -> Placed | None:
        if any(_is_inside(name, region) for region in self.regions):
            return self.on(COPY)
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            kinds = {type(style) for other, style in self.styles.items() if other.rpartition(".")[0] == parent}
            if {ColwiseParallel, RowwiseParallel} <= kinds and parent:
                raise UnsupportedError(
                    f"module {name} has parameters and no style, but lies beside column- and row-parallel products of "
                    f"{parent}; give {parent} a PrepareModuleInput, or write the plan of {name} as YAML."
                )
        return None

    def _entry(self, name: str, style: ParallelStyle) -> ModuleSpec:
        module = self.modules[name]
        if type(style) is ColwiseParallel or type(style) is RowwiseParallel:
            if isinstance(module, nn.Embedding):
                return self._embedding(name, style)
            if isinstance(module, nn.Linear):
                return self._linear(name, module, style)
            raise UnsupportedError(
                f"module {name} is a {type(module).__name__}; {type(style).__name__} is for nn.Linear and nn.Embedding."
            )
        if type(style) is SequenceParallel:
            placed = self.on(_converted(style.sequence_sharding[0], name))
            parameters = {
                key: ParameterSpec(used=self.on(COPY)) for key, p in module._parameters.items() if p is not None
            }
            first = next(iter(argument_names(module)))
            return ModuleSpec(inputs={first: InputSpec(arrives=placed, needs=placed)}, parameters=parameters)
        if type(style) is PrepareModuleInput:
            return self._prepared_input(name, module, style)
        if type(style) is PrepareModuleOutput:
            if len(style.output_layouts) != 1:
                raise UnsupportedError(
                    f"module {name}: PrepareModuleOutput of several outputs; write the plan as YAML."
                )
            return ModuleSpec(
                outputs={"first": self._output(name, style.output_layouts[0], style.desired_output_layouts[0])}
            )
        raise UnsupportedError(f"module {name} has the style {type(style).__name__}, which a plan cannot be made from.")

    def _output(self, name: str, produces: Placement | None, leaves: Placement | None) -> OutputSpec:
        return OutputSpec(produces=self.on(_converted(produces, name)), leaves=self.on(_converted(leaves, name)))

    def _linear(self, name: str, module: nn.Linear, style: ColwiseParallel | RowwiseParallel) -> ModuleSpec:
        arrives = _converted(style.input_layouts[0], f"the input of {name}")
        leaves = self.on(_converted(style.output_layouts[0], f"the output of {name}"))
        is_column = type(style) is ColwiseParallel
        if is_column and arrives == REPLICATE and any(_is_inside(name, region) for region in self.regions):
            arrives = COPY
        parameters = {"weight": ParameterSpec(held=self.on(shard(0 if is_column else 1)))}
        if module.bias is not None:
            bias = ParameterSpec(held=self.on(shard(0))) if is_column else ParameterSpec(used=self.on(PARTIAL))
            parameters["bias"] = bias
        return ModuleSpec(
            inputs={"input": InputSpec(arrives=self.on(arrives), needs=self.on(COPY if is_column else shard(-1)))},
            outputs={"output": OutputSpec(produces=self.on(shard(-1) if is_column else PARTIAL), leaves=leaves)},
            parameters=parameters,
        )

    def _embedding(self, name: str, style: ColwiseParallel | RowwiseParallel) -> ModuleSpec:
        if not isinstance(style.input_layouts[0], Replicate):
            raise UnsupportedError(
                f"module {name}: indices of an embedding must be Replicate, but are {style.input_layouts[0]}."
            )
        is_column = type(style) is ColwiseParallel
        leaves = self.on(_converted(style.output_layouts[0], f"the output of {name}"))
        return ModuleSpec(
            outputs={"output": OutputSpec(produces=self.on(shard(-1) if is_column else PARTIAL), leaves=leaves)},
            parameters={"weight": ParameterSpec(held=self.on(shard(1 if is_column else 0)))},
            body="plain" if is_column else "vocabulary_embedding",
        )

    def _prepared_input(self, name: str, module: nn.Module, style: PrepareModuleInput) -> ModuleSpec:
        desired = style.desired_input_layouts or ()
        pairs = dict(zip(argument_names(module), zip(style.input_layouts or (), desired, strict=True), strict=False))
        for key, placement in style.input_kwarg_layouts.items():
            pairs[key] = (placement, style.desired_input_kwarg_layouts[key])
        inputs = {}
        for key, (before, after) in pairs.items():
            if before is None or after is None:
                continue
            where = f"input {key} of {name}"
            needs = _converted(after, where)
            needs = COPY if needs == REPLICATE and name in self.regions else needs
            inputs[key] = InputSpec(arrives=self.on(_converted(before, where)), needs=self.on(needs))
        return ModuleSpec(inputs=inputs)


def _is_inside(name: str, region: str) -> bool:
    return name == region or name.startswith(f"{region}.")
