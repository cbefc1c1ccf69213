"""`apply_plan(..., mode="validation")`: every forward of the model is followed, on the ranks that really run it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.dtensor.applied import applied_plan
from hp_plugin.core.dtensor.apply import apply_plan
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.loss import loss_function
from hp_plugin.core.dtensor.placement import shard
from hp_plugin.core.dtensor.plan import ModuleSpec, ShardingPlan
from hp_plugin.core.dtensor.validation.calls import tensors_in, with_tensors
from hp_plugin.core.dtensor.validation.exchange import ProcessExchange
from hp_plugin.core.dtensor.validation.follow import (
    RecordingFollower,
    follow,
    follow_loss,
    named_inputs,
    replace_inputs,
)
from hp_plugin.core.dtensor.validation.perturb import perturb_constants
from hp_plugin.core.dtensor.validation.reference import Record, Recorder
from hp_plugin.core.dtensor.validation.report import PlacementError, SimulationReport
from hp_plugin.core.dtensor.validation.session import Session
from hp_plugin.errors import ConfigurationError, UnsupportedError


def apply_for_validation(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, *, regions: Sequence[str] = ()
) -> nn.Module:
    """Applies `plan` as in production, and lets every forward be followed along one of the whole model.

    Each rank keeps the whole model too, and runs it first. Constant parameters (zeros, ones) are perturbed, as they
    would hide faults: a model in this mode is for looking at, not for training. Every rank of the mesh must call.

    Raises:
        ConfigurationError: as `apply_plan`; and ranks have initialised the model differently.
    """
    check_plan(model, plan)
    perturb_constants(model)
    reference = copy.deepcopy(model)
    apply_plan(model, plan, mesh)
    applied = applied_plan(model)
    assert applied is not None
    exchange = ProcessExchange(list(applied.lines.values()))
    _check_equal(reference, exchange)
    weights = {name: p.detach() for name, p in reference.named_parameters(remove_duplicate=False)}
    follower = _LiveFollower(model, reference, Session(applied, exchange, model, weights, regions), plan, regions)
    follow(model, follower)
    follow_loss(model, follower)
    return model


def report_of(model: nn.Module) -> SimulationReport:
    """What the last forward of a model in validation mode, and the loss behind it, has shown.

    Raises:
        ConfigurationError: the model is not in validation mode.
    """
    follower = getattr(model, "_hp_follower", None)
    if not isinstance(follower, _LiveFollower):
        raise ConfigurationError('the model is not in validation mode; apply a plan with mode="validation" first.')
    return follower.report()


def _check_equal(reference: nn.Module, exchange: ProcessExchange) -> None:
    """Every rank must have made the same weights, or all comparisons would be with different models."""
    sums = {
        name: t.detach().double().sum().item() for name, t in reference.state_dict().items() if t.is_floating_point()
    }
    for rank, other in enumerate(exchange.gather(sums)):
        for name, value in sums.items():
            if other.get(name) != value and not (value != value and other.get(name) != other.get(name)):
                raise ConfigurationError(
                    f"rank {rank} of the plan's axes has initialised {name} otherwise than this rank; seed all ranks "
                    "alike before the model is made, or load one checkpoint."
                )


class _LiveFollower:
    """Runs one process's forward before each of the planned model, and lets a session compare the two."""

    def __init__(
        self, model: nn.Module, reference: nn.Module, session: Session, plan: ShardingPlan, regions: Sequence[str]
    ) -> None:
        self._model, self._reference, self._session = model, reference, session
        self._plan = plan
        self._recording = RecordingFollower(plan, regions)
        follow(reference, self._recording)
        follow_loss(reference, self._recording)
        self._results: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._operations: list[Any] = []
        self._finding: Any = None

    def report(self) -> SimulationReport:
        """See `report_of`."""
        axes = dict(self._plan.axes)
        return SimulationReport(
            axes, axes, (self._finding,) if self._finding else (), tuple(self._operations), axes_kind="processes"
        )

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Follower`."""
        if module is not self._model or self._session.is_following:
            return self._session.call(module, forward, args, kwargs)
        if any(type(p) is not nn.Parameter for p in module.parameters()):
            raise UnsupportedError(
                "a model in validation mode cannot be sharded further; use hp_plugin.validate to compare a plan with "
                "fully_shard."
            )
        self._operations, self._finding = [], None
        own_args, own_kwargs = self._whole(args, kwargs)
        records, expected = self._record(lambda: self._reference(*own_args, **own_kwargs))
        result = self._follow(records, lambda: self._session.call(module, forward, args, kwargs))
        self._results = (list(tensors_in(result)), list(tensors_in(expected)))
        return result

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See `Follower`. A loss inside of forward is followed with it, one behind it is followed of its own."""
        inside = self._session.loss(function)

        def followed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._session.is_following:
                return inside(*args, **kwargs)
            logits = next((i for i, t in enumerate(self._results[0]) if args and t is args[0]), None)
            if logits is None:
                return function(*args, **kwargs)
            whole = self._results[1][logits]
            rest, options = self._all_rows(args[1:]), self._all_rows(kwargs)
            records, _ = self._record(lambda: loss_function(self._reference)(whole, *rest, **options))
            result: torch.Tensor = self._follow(records, lambda: inside(*args, **kwargs))
            return result

        return followed

    def _record(self, run: Callable[[], Any]) -> tuple[list[Record], Any]:
        recorder = Recorder()
        self._recording.recorder = recorder
        try:
            with recorder.running():
                result = run()
        finally:
            self._recording.recorder = None
        return recorder.records, result

    def _follow(self, records: list[Record], run: Callable[[], Any]) -> Any:
        try:
            with self._session.following(records):
                result = run()
        except PlacementError as error:
            self._finding = error.finding
            raise
        finally:
            self._operations += self._session.operations
        return result

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as one process gets them: pieces are put together, tensors are the reference's own."""
        spec = self._plan.modules.get("", ModuleSpec())
        grid = self._session.grid
        found = {}
        for key, tensor in named_inputs(self._model, "", spec, args, kwargs).items():
            placing = grid.placing(spec.inputs[key].arrives, tensor.ndim)
            if any(p.kind != "replicate" for p in placing):
                found[key] = self._session.assemble(tensor, placing)
        args, kwargs = replace_inputs(self._model, "", spec, args, kwargs, found)
        return self._all_rows(args), self._all_rows(kwargs)

    def _all_rows(self, value: Any) -> Any:
        """Of what the batch's axes divide, all rows."""
        if not self._plan.batch:
            return value
        rows = self._session.grid.placing(dict.fromkeys(self._plan.batch, shard(0)), 1)
        return with_tensors(value, iter([self._session.assemble(t, rows) for t in tensors_in(value)]))
