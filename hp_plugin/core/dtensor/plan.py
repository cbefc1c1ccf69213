"""`ShardingPlan`: how the tensors of a model are laid out, module by module. Data only; see `docs/sharding-plan.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from hp_plugin.core.dtensor.placement import REPLICATE, AxisPlacement
from hp_plugin.errors import ConfigurationError

Placed = dict[str, AxisPlacement]
"""Mesh axis -> placement; an axis that is not named is `replicate`."""


def placement_on(placed: Mapping[str, AxisPlacement], axis: str) -> AxisPlacement:
    """The placement on `axis`."""
    return placed.get(axis, REPLICATE)


def same_placed(one: Mapping[str, AxisPlacement], other: Mapping[str, AxisPlacement]) -> bool:
    """Whether both say the same of every axis."""
    return all(placement_on(one, axis) == placement_on(other, axis) for axis in {*one, *other})


def describe_placed(placed: Mapping[str, AxisPlacement]) -> str:
    """For people: `tp: shard(1)`, or `replicate` where no axis says otherwise."""
    return ", ".join(f"{axis}: {p}" for axis, p in placed.items() if p != REPLICATE) or "replicate"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputSpec(_Entry):
    """An argument of `forward`: as the caller passes it, and as the body uses it."""

    arrives: Placed = Field(default_factory=dict)
    needs: Placed = Field(default_factory=dict)


class OutputSpec(_Entry):
    """A result of `forward`: as the body computes it, and as callers get it."""

    produces: Placed = Field(default_factory=dict)
    leaves: Placed = Field(default_factory=dict)


class ParameterSpec(_Entry):
    """A parameter: as ranks keep it, and as the body uses it.

    Attributes:
        held: as ranks keep it.
        used: as the body uses it; None: as it is held.
        unit: the dim that an axis divides is cut at multiples of so many rows only, e.g. the size of a head.
    """

    held: Placed = Field(default_factory=dict)
    used: Placed | None = None
    unit: PositiveInt = 1

    @property
    def in_use(self) -> Placed:
        """As the body uses it."""
        return self.held if self.used is None else self.used


class ModuleSpec(_Entry):
    """What happens to tensors at the border of one module, and to its parameters.

    Attributes:
        inputs: by the names of the parameters of `forward`.
        outputs: `output` for a single tensor, `first` for that or the first of a tuple, else index or key.
        parameters: by their names relative to the module, e.g. `weight` or `q_proj.weight`.
        body: "vocabulary_embedding" looks up the ids whose rows the rank holds and gives zeros for others.
        divides: integer attribute of the module -> axis by whose size it is divided when the plan is applied.
        dispatch: the module holds experts, stacked weights or a list of modules, which this axis divides; each rank
            sends its tokens to the experts chosen for them.
    """

    inputs: dict[str, InputSpec] = Field(default_factory=dict)
    outputs: dict[str, OutputSpec] = Field(default_factory=dict)
    parameters: dict[str, ParameterSpec] = Field(default_factory=dict)
    body: Literal["plain", "vocabulary_embedding"] = "plain"
    divides: dict[str, str] = Field(default_factory=dict)
    dispatch: str | None = None


class ShardingPlan(_Entry):
    """How the tensors of a model are laid out over mesh axes, by module name.

    Attributes:
        axes: mesh axis -> its number of ranks. Data-parallel axes are not among them.
        modules: module name -> its entry; the name of the model itself is the empty string.
        batch: axes over which the batch is divided too. What they do not divide is averaged over them by whoever
            averages over the data-parallel axes; gradients of what they divide are made means here.
    """

    axes: dict[str, PositiveInt]
    modules: dict[str, ModuleSpec] = Field(default_factory=dict)
    batch: tuple[str, ...] = ()

    # ---------------------------------------------------------------- files

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and strings, without what has its default value."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_yaml(self) -> str:
        """The plan as YAML; `from_yaml` reads it back to an equal plan."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=120)

    def to_json(self) -> str:
        """The plan as JSON; `from_yaml` reads it too, JSON being YAML."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Any) -> ShardingPlan:
        """Checks types and names of fields.

        Raises:
            ConfigurationError: naming each entry that is wrong, and where it is.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            found = "; ".join(f"{' / '.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in error.errors())
            raise ConfigurationError(f"the sharding plan cannot be read: {found}.") from error

    @classmethod
    def from_yaml(cls, text: str) -> ShardingPlan:
        """Reads YAML or JSON. Raises ConfigurationError for text that is neither, or no plan."""
        try:
            data = yaml.load(text, Loader=_UniqueKeyLoader)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"the sharding plan is not YAML: {error}") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Writes JSON to a file named `*.json`, else YAML."""
        path = Path(path)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Reads a YAML or JSON file."""
        return cls.from_yaml(Path(path).read_text())

    # ---------------------------------------------------------------- questions

    def placed_parameters(self) -> dict[str, ParameterSpec]:
        """Full parameter name -> entry. Raises ConfigurationError for a name that two entries cover."""
        covered: dict[str, tuple[str, ParameterSpec]] = {}
        for module, spec in self.modules.items():
            for relative, entry in spec.parameters.items():
                name = f"{module}.{relative}" if module else relative
                if name in covered:
                    raise ConfigurationError(
                        f"parameter {name} is covered twice, by the entries of modules {covered[name][0]!r} and "
                        f"{module!r}; remove one of them."
                    )
                covered[name] = (module, entry)
        return {name: entry for name, (_, entry) in covered.items()}

    def diff(self, other: ShardingPlan) -> list[str]:
        """What changes from this plan to `other`: one line per entry, `path: before -> after`. Empty if equal."""
        before, after = _flat(self.to_dict()), _flat(other.to_dict())
        return [
            f"{path}: {before.get(path, 'absent')} -> {after.get(path, 'absent')}"
            for path in dict.fromkeys([*before, *after])
            if before.get(path) != after.get(path)
        ]

    def __str__(self) -> str:
        """A table: one line per input, output and parameter, with the collectives left to the reader."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        batch = f"; the batch is divided over {', '.join(self.batch)}" if self.batch else ""
        lines = [f"ShardingPlan over {axes}{batch}"]
        for name, spec in self.modules.items():
            lines.append(f"{name or '(model)'}" + ("" if spec.body == "plain" else f"  [{spec.body}]"))
            for key, inp in spec.inputs.items():
                lines.append(f"  in    {key}: {describe_placed(inp.arrives)} -> {describe_placed(inp.needs)}")
            for key, out in spec.outputs.items():
                lines.append(f"  out   {key}: {describe_placed(out.produces)} -> {describe_placed(out.leaves)}")
            for key, param in spec.parameters.items():
                use = "" if param.used is None else f", used as {describe_placed(param.used)}"
                lines.append(f"  param {key}: {describe_placed(param.held)}{use}")
            for key, axis in spec.divides.items():
                lines.append(f"  count {key}: divided by {axis}")
            if spec.dispatch is not None:
                lines.append(f"  experts: divided by {spec.dispatch}, tokens by all-to-all")
        return "\n".join(lines)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key that occurs twice is an error: the second would silently win."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:
            raise ConfigurationError(
                f"the sharding plan names {key!r} twice in one mapping, again in line {key_node.start_mark.line + 1}; "
                "merge the two."
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in data.items():
        path = f"{prefix} / {key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, path))
        else:
            flat[path] = "replicate" if value == {} else str(value)
    return flat
