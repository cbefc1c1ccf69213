"""`hp-plugin validate`: a sharding plan against its model, on simulated ranks in this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from rich.console import Console
from rich.markup import escape
from torch import nn

from hp_plugin.core.dtensor import ShardingPlan, SimulationReport, plan_transformer, simulate
from hp_plugin.errors import ConfigurationError

_AXES = {"tp": "tensor_parallel_degree", "ep": "expert_parallel_degree"}


class ModelSource(BaseModel):
    """Where the model comes from: exactly one of the two."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    factory: str | None = Field(default=None, description="module:function, called without arguments")
    hugging_face: str | None = Field(default=None, description="a folder with a config.json of transformers")


class Batch(BaseModel):
    """Random tokens that are passed through the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: PositiveInt = 4
    sequence: PositiveInt = 16
    vocabulary: PositiveInt | None = Field(
        default=None, description="number of tokens; None: that of the model's embedding"
    )


class Parallelism(BaseModel):
    """Degrees, by the names of the parallelism block."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_degree: PositiveInt = 1
    pipeline_parallel_degree: PositiveInt = 1
    context_parallel_degree: PositiveInt = 1
    expert_parallel_degree: PositiveInt = 1
    data_parallel_replicate_degree: PositiveInt = 1
    data_parallel_shard_degree: PositiveInt = 1


class Configuration(BaseModel):
    """The file that `--config` names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelSource = ModelSource()
    parallelism: Parallelism = Parallelism()
    topology: dict[str, Any] = Field(default_factory=dict, description="read by other commands; no matter here")
    plan: str | None = Field(
        default=None, description="a plan's file, relative to this one; None: planned from the model"
    )
    sequence_parallel: bool = False
    loss_parallel: bool = False
    overrides: dict[str, Any] = Field(default_factory=dict)
    batch: Batch = Batch()
    dtype: Literal["float32", "float64"] = "float64"


@dataclass(frozen=True)
class Result:
    """What was validated.

    Attributes:
        plan: The plan's file, or how it was made.
        model: Where the model came from.
        modules: Number of modules with an entry in the plan.
        simulation: What following the plan found.
        unplanned: Axes of the configuration that a plan says nothing of.
    """

    plan: str
    model: str
    modules: int
    simulation: SimulationReport
    unplanned: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether the plan computes what one process does."""
        return self.simulation.is_equal

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "equal": self.is_equal,
            "plan": self.plan,
            "model": self.model,
            "modules": self.modules,
            "unplanned": self.unplanned,
            "simulation": self.simulation.to_dict(),
        }


def run(
    config: str | None,
    *,
    plan: str | None = None,
    model: str | None = None,
    rows: int | None = None,
    sequence: int | None = None,
    save_plan: str | None = None,
    seed: int = 0,
) -> Result:
    """Makes or loads the plan, checks it against the model, and follows it through a training step.

    Args:
        config: File of a `Configuration`; None where `plan` and `model` say all.
        plan: File of a plan; wins over the configuration.
        model: `module:function`, or a folder with a config.json of transformers; wins over the configuration.
        rows: Of the batch; wins over the configuration.
        sequence: Tokens of a row; wins over the configuration.
        save_plan: File to write the plan to.
        seed: Of weights and tokens.

    Raises:
        ConfigurationError: A file or name cannot be used, or the plan does not fit the model.
        UnsupportedError: The model cannot be planned or followed.
    """
    options, folder = _read(config)
    if model is not None:
        source = ModelSource(**{"factory" if ":" in model else "hugging_face": model})
        options = options.model_copy(update={"model": source})
    sizes = {name: size for name, size in (("rows", rows), ("sequence", sequence)) if size is not None}
    options = options.model_copy(update={"batch": options.batch.model_copy(update=sizes)})
    make, described = _model_of(options.model, folder)
    torch.manual_seed(seed)
    first = make()
    file = Path(plan) if plan is not None else (None if options.plan is None else folder / options.plan)
    chosen = _planned(first, options) if file is None else _loaded(file)
    batch = _batch_of(first, options.batch, seed)
    _try_batch(first, batch)
    if save_plan is not None:
        chosen.save(save_plan)

    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    report = simulate(seeded, chosen, batch, dtype=getattr(torch, options.dtype), seed=seed)
    how = "planned from the model" if file is None else str(file)
    return Result(how, described, len(chosen.modules), report, _unplanned(options.parallelism, chosen))


def render(result: Result, *, console: Console | None = None) -> None:
    """Prints the result for people."""
    out = console or Console(highlight=False, soft_wrap=True)
    out.print(f"model  {escape(result.model)}")
    out.print(f"plan   {escape(result.plan)}: {result.modules} modules")
    for line in result.unplanned:
        out.print(f"note   {escape(line)}")
    out.print(escape(str(result.simulation)))
    if result.is_equal:
        out.print("[bold green]the plan computes what one process does[/]")
    else:
        out.print("[bold red]the plan does not compute what one process does[/]")


def _read(config: str | None) -> tuple[Configuration, Path]:
    if config is None:
        return Configuration(), Path()
    path = Path(config)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Configuration(**(found or {})), path.parent
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigurationError(f"{path} is no YAML mapping: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{path}: {place}: {first['msg']}.") from error


def _model_of(source: ModelSource, folder: Path) -> tuple[Callable[[], nn.Module], str]:
    if (source.factory is None) == (source.hugging_face is None):
        raise ConfigurationError(
            "name one model: --model module:function, --model FOLDER, or model.factory or model.hugging_face in the "
            "configuration."
        )
    if source.factory is not None:
        return _factory(source.factory), source.factory
    assert source.hugging_face is not None
    place = folder / source.hugging_face
    return _of_transformers(place), str(place)


def _factory(name: str) -> Callable[[], nn.Module]:
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"the model {name} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigurationError(f"the model {name} is a {type(found).__name__}; name a function that makes it.")
    return found


def _of_transformers(folder: Path) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError("transformers is not installed; install it, or name a module:function.") from error
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} has no config.json of transformers.")
    settings = transformers.AutoConfig.from_pretrained(str(folder))
    settings._attn_implementation = "eager"
    return lambda: transformers.AutoModelForCausalLM.from_config(settings)


def _planned(model: nn.Module, options: Configuration) -> ShardingPlan:
    degrees = options.parallelism
    axes = {axis: getattr(degrees, name) for axis, name in _AXES.items()}
    with_experts = axes["ep"] > 1
    return plan_transformer(
        model,
        axes if with_experts else {"tp": axes["tp"]},
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
        expert_axis="ep" if with_experts else None,
        overrides=options.overrides,
    )


def _loaded(file: Path) -> ShardingPlan:
    try:
        return ShardingPlan.load(file)
    except OSError as error:
        raise ConfigurationError(f"the plan {file} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{file} is no plan: {place}: {first['msg']}.") from error


@torch.no_grad()
def _try_batch(model: nn.Module, batch: Any) -> None:
    """One forward of the model as it is, so that what it cannot take is not mistaken for a fault of the plan."""
    try:
        _ = model(**batch) if isinstance(batch, dict) else model(batch[0])
    except Exception as error:
        raise ConfigurationError(
            f"the model fails on the batch, without any plan: {type(error).__name__}: {error}. Set batch.rows, "
            "batch.sequence and batch.vocabulary to what it takes."
        ) from error


def _batch_of(model: nn.Module, options: Batch, seed: int) -> Any:
    """Tokens and targets, or arguments of a model of transformers."""
    vocabulary = options.vocabulary
    if vocabulary is None:
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not sizes:
            raise ConfigurationError("the model has no embedding; give batch.vocabulary in the configuration.")
        vocabulary = max(sizes)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (options.rows, options.sequence + 1), generator=generator)
    if hasattr(model, "config") and hasattr(model, "generate"):
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]}
    return tokens[:, :-1], tokens[:, 1:]


def _unplanned(degrees: Parallelism, plan: ShardingPlan) -> list[str]:
    of_axes = {"pp": "pipeline_parallel_degree", "cp": "context_parallel_degree", **_AXES}
    return [
        f"{name} {getattr(degrees, name)} is not part of the plan and was not validated"
        for axis, name in of_axes.items()
        if getattr(degrees, name) > 1 and plan.axes.get(axis, 1) == 1
    ]
