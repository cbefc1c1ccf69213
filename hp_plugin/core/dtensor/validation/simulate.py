"""`simulate`: follows a plan through one training step on simulated ranks, with values, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor.applied import applied_plan
from hp_plugin.core.dtensor.apply import apply_plan
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.loss import loss_of_batch
from hp_plugin.core.dtensor.plan import ShardingPlan
from hp_plugin.core.dtensor.validation.batches import cloned, converted, rows_of
from hp_plugin.core.dtensor.validation.follow import RecordingFollower, follow, follow_loss
from hp_plugin.core.dtensor.validation.perturb import perturb_constants
from hp_plugin.core.dtensor.validation.reference import Record, Recorder
from hp_plugin.core.dtensor.validation.report import Finding, PlacementError, SimulationReport
from hp_plugin.core.dtensor.validation.session import Session
from hp_plugin.core.dtensor.validation.shapes import check_shapes
from hp_plugin.core.dtensor.validation.simulated import SimulatedRanks
from hp_plugin.errors import UnsupportedError

MOST_RANKS = 32
"""Plans of more ranks are followed with values on a reduced plan."""


def simulate(
    model_fn: Callable[[], nn.Module],
    plan: ShardingPlan,
    batch: Mapping[str, Any] | tuple[torch.Tensor, torch.Tensor],
    *,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    reference_fn: Callable[[], nn.Module] | None = None,
    regions: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
    after_apply: Callable[[nn.Module], None] | None = None,
) -> SimulationReport:
    """Follows a plan through forward and backward, with one thread per rank, and stops at the first fault.

    Needs no process group and no device. Every operation's output is compared with that of one process and its
    placement found; every boundary must convert what the plan says; gradients are checked operation by operation, and
    those of the parameters after the real backward. See `docs/validation.md`.

    A plan of more than 32 ranks is followed without values on all ranks, and with values on the same plan with each
    axis reduced to 2.

    Args:
        model_fn: makes the whole model. Its constant parameters (zeros, ones) are perturbed: they would hide faults.
        plan: the plan. Only its axes are simulated; data-parallel ones repeat the same work.
        batch: keyword arguments of a model that returns `.loss`, or the model's input and targets of a cross-entropy.
        loss_fn: model and batch -> loss; None: as `batch` says.
        reference_fn: makes the model for one process, where `model_fn`'s communicates by itself. Same parameter names.
        regions: names of modules, or patterns, that run other operations when divided; compared at their borders only.
        dtype: convert model and batch to it first; `torch.float64` leaves no doubt about rounding.
        seed: of the random numbers that every rank draws.
        timeout_s: how long a rank waits for the others.
        after_apply: called with each rank's planned model; tests put faults here.

    Returns:
        What was followed and found. It does not raise for a fault; `raise_if_different` does.

    Raises:
        ConfigurationError: the plan does not fit the model, or the batch its axes.
        UnsupportedError: random numbers that cannot be replayed, or a collective whose meaning is not known.
    """
    model = _prepared(copy.deepcopy(model_fn()), dtype)
    check_plan(model, plan)
    batch = converted(batch, dtype)
    perturb_constants(model)
    reference = copy.deepcopy(model)
    if reference_fn is not None:
        reference = _prepared(reference_fn(), dtype)
        reference.load_state_dict(model.state_dict())
    if plan.batch and loss_fn is not None:
        raise UnsupportedError(
            f"the plan divides the batch over {', '.join(plan.batch)}, and what loss_fn does over ranks is not known; "
            "use loss_function(model), or a model that computes its loss, and give no loss_fn."
        )
    planned_axes, shapes = dict(plan.axes), 0
    loss_of = loss_fn or loss_of_batch
    ranks = SimulatedRanks(plan.axes)
    if len(ranks.exchanges) > MOST_RANKS:
        finding, shapes = check_shapes(model, plan, batch, loss_of)
        if finding is not None:
            return SimulationReport({}, planned_axes, (finding,), (), 0, shapes)
        plan = plan.model_copy(update={"axes": {axis: min(size, 2) for axis, size in plan.axes.items()}})
    ranks = SimulatedRanks(plan.axes, timeout_s=timeout_s, seed=seed)
    sessions = [
        _planned(copy.deepcopy(model), plan, ranks, rank, reference, regions, after_apply)
        for rank in range(len(ranks.exchanges))
    ]
    records, gradients = _recorded(reference, plan, batch, loss_of, regions, seed)

    def run(rank: int) -> None:
        session, planned = sessions[rank]
        mine = rows_of(batch, plan, session.grid)
        with session.following(records):
            loss = loss_of(planned, mine)
        loss.backward()
        session.check_gradients(gradients)

    findings: tuple[Finding, ...] = ()
    try:
        if after_apply is not None:
            ranks.run(lambda rank: after_apply(sessions[rank][1]))
        ranks.run(run)
    except PlacementError as error:
        findings = (error.finding,)
    first = sessions[0][0]
    return SimulationReport(
        dict(plan.axes), planned_axes, findings, tuple(first.operations), first.parameters_compared, shapes
    )


def _planned(
    model: nn.Module,
    plan: ShardingPlan,
    ranks: SimulatedRanks,
    rank: int,
    reference: nn.Module,
    regions: Sequence[str],
    after_apply: Any,
) -> tuple[Session, nn.Module]:
    apply_plan(model, plan, ranks.meshes[rank])  # type: ignore[arg-type]
    applied = applied_plan(model)
    assert applied is not None
    weights = {name: p.detach() for name, p in reference.named_parameters(remove_duplicate=False)}
    session = Session(applied, ranks.exchanges[rank], model, weights, regions)
    follow(model, session)
    follow_loss(model, session)
    return session, model


def _recorded(
    reference: nn.Module, plan: ShardingPlan, batch: Any, loss_of: Any, regions: Sequence[str], seed: int
) -> tuple[list[Record], dict[str, torch.Tensor | None]]:
    """What one process computes, and the gradients of its parameters."""
    follower = RecordingFollower(plan, regions)
    follow(reference, follower)
    follow_loss(reference, follower)
    recorder = Recorder(seed)
    follower.recorder = recorder
    mine = cloned(batch)
    with recorder.running():
        loss = loss_of(reference, mine)
    follower.recorder = None
    loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
    return recorder.records, gradients


def _prepared(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return model if dtype is None else model.to(dtype)
