"""A plan's shapes on all of its ranks, without values: parameters by their layouts, activations on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor.applied import applied_plan
from hp_plugin.core.dtensor.apply import apply_plan
from hp_plugin.core.dtensor.placement import shard
from hp_plugin.core.dtensor.plan import ModuleSpec, Placed, ShardingPlan
from hp_plugin.core.dtensor.validation.arrangement import Grid
from hp_plugin.core.dtensor.validation.batches import mapped, rows_of
from hp_plugin.core.dtensor.validation.calls import tensors_in
from hp_plugin.core.dtensor.validation.exchange import Meeting
from hp_plugin.core.dtensor.validation.follow import follow, named_inputs, named_outputs, path_of
from hp_plugin.core.dtensor.validation.report import Finding, PlacementError
from hp_plugin.core.dtensor.validation.simulated import SimulatedMesh
from hp_plugin.errors import HyperParallelError

Shapes = dict[tuple[str, int, str], tuple[int, ...]]
"""Module, call and tensor -> shape in one process."""


def check_shapes(
    model: nn.Module, plan: ShardingPlan, batch: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor]
) -> tuple[Finding | None, int]:
    """Runs forward on the meta device as every rank of the plan's axes, one after the other.

    A module whose sizes depend on values, such as experts that pick their tokens, gives the shape of its first input.
    Shapes at every border must be the pieces of those of one process; sizes that an axis does not divide, and
    operations that fail on a piece, are found. Returns the first fault, and the number of ranks that were looked at.
    """
    whole = copy.deepcopy(model).to("meta")
    batch = mapped(batch, lambda t: t.to("meta"))
    shapes: Shapes = {}
    one = copy.deepcopy(whole)
    follow(one, _Shapes(plan, shapes, None))
    loss_of(one, batch)
    first = Grid(tuple(plan.axes), tuple(plan.axes.values()), (0,) * len(plan.axes))
    meetings = _Nowhere()
    for count, coordinate in enumerate(first.coordinates):
        grid = first.at(coordinate)
        planned = copy.deepcopy(whole)
        follower: _Shapes | None = None
        try:
            apply_plan(planned, plan, SimulatedMesh(grid, meetings))  # type: ignore[arg-type]
            _check_parameters(planned, whole, plan, grid)
            follower = _Shapes(plan, shapes, grid)
            follow(planned, follower)
            loss_of(planned, rows_of(batch, plan, grid))
        except PlacementError as error:
            return error.finding, count + 1
        except (HyperParallelError, RuntimeError, ValueError, IndexError) as error:
            module = follower.inside[-1] if follower is not None and follower.inside else ""
            text = str(error).splitlines()[0]
            return Finding("shape", module, "call", axis=_names(grid), rank=grid.index, reason=text), count + 1
    return None, first.size


class _Nowhere(Mapping[Any, Meeting]):
    """Ranks without values do not meet."""

    def __getitem__(self, key: Any) -> Meeting:
        return Meeting(1, 1.0)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Shapes:
    """Notes the shapes of one process, or compares with them."""

    def __init__(self, plan: ShardingPlan, shapes: Shapes, grid: Grid | None) -> None:
        self._plan, self._shapes, self._grid = plan, shapes, grid
        self._calls: dict[str, int] = {}
        self.inside: list[str] = []

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Follower`."""
        name = path_of(module)
        spec = self._plan.modules.get(name, ModuleSpec())
        number = self._calls[name] = self._calls.get(name, -1) + 1
        for key, tensor in named_inputs(module, name, spec, args, kwargs).items():
            self._note(name, number, f"input {key}", tensor, spec.inputs[key].arrives)
        self.inside.append(name)
        # Which tokens go to which experts is data: without values, as many come back as were sent.
        if spec.dispatch is not None:
            result = _like_input(args, kwargs)
        else:
            try:
                result = forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if not _needs_values(error):
                    raise
                result = _like_input(args, kwargs)
        self.inside.pop()
        for key, tensor in named_outputs(result, spec).items():
            self._note(name, number, f"output {key}", tensor, spec.outputs[key].leaves)
        return result

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See `Follower`."""
        return function

    def _note(self, name: str, number: int, what: str, tensor: torch.Tensor, placed: Placed) -> None:
        if self._grid is None:
            self._shapes[name, number, what] = tuple(tensor.shape)
            return
        whole = self._shapes.get((name, number, what))
        if whole is not None:
            rows = dict.fromkeys(self._plan.batch, shard(0))
            divided = placed if tuple(tensor.shape) == whole else {**rows, **placed}
            _compare(name, what, tuple(tensor.shape), whole, divided, self._grid)


def _needs_values(error: Exception) -> bool:
    """Whether an operation has failed because its sizes depend on values, which the meta device has not."""
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error)


def _like_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(next(t for t in tensors_in((args, kwargs)) if t.is_floating_point()))


def _check_parameters(planned: nn.Module, whole: nn.Module, plan: ShardingPlan, grid: Grid) -> None:
    applied = applied_plan(planned)
    assert applied is not None
    placed = plan.placed_parameters()
    wholes = dict(whole.named_parameters())
    for name, parameter in planned.named_parameters():
        owner, _, attribute = name.rpartition(".")
        full = applied.whole_name(name)
        shape = tuple(wholes[full].shape)
        _compare(owner, f"parameter {attribute}", tuple(parameter.shape), shape, placed[full].held, grid)


def _compare(
    module: str, what: str, found: tuple[int, ...], whole: tuple[int, ...], placed: Placed, grid: Grid
) -> None:
    placing = grid.placing(placed, len(whole))
    expected: tuple[int, ...] | None = None
    if grid.fits(whole, placing):
        expected = tuple(grid.cut(torch.empty(whole, device="meta"), placing).shape)
    if found != expected:
        size = "no size, the axes do not divide it" if expected is None else str(expected)
        raise PlacementError(
            Finding(
                "shape",
                module,
                "boundary",
                what,
                _names(grid),
                grid.describe(placing),
                f"shape {found}",
                grid.index,
                reason=f"In one process it has {whole}, so the plan gives it {size}.",
            )
        )


def _names(grid: Grid) -> str:
    return ", ".join(grid.divided)
