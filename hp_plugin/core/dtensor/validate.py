"""`validate`: runs a plan and one process on the same weights and data, and compares everything by value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from hp_plugin.core.dtensor.apply import apply_plan
from hp_plugin.core.dtensor.compare import Comparer, RunResult, whole_named
from hp_plugin.core.dtensor.loss import loss_of_batch
from hp_plugin.core.dtensor.plan import ShardingPlan
from hp_plugin.core.dtensor.report import ValidationReport
from hp_plugin.core.dtensor.trace import traced
from hp_plugin.core.layout import attached_layout, local_tensor
from hp_plugin.core.optim.clip import total_grad_norm
from hp_plugin.errors import ConfigurationError, UnsupportedError

Batch = Mapping[str, Any] | tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Any], torch.Tensor]


def validate(
    model_fn: Callable[[], nn.Module],
    plan: ShardingPlan,
    mesh: DeviceMesh,
    batch: Batch,
    *,
    loss_fn: LossOf | None = None,
    data_parallel: Callable[[nn.Module], nn.Module] | None = None,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    dtype: torch.dtype | None = None,
    after_apply: Callable[[nn.Module], None] | None = None,
) -> ValidationReport:
    """Compares one training step under `plan` with the same step of one process, on the same weights and data.

    Compared on every rank, each with its piece of what one process has: the loss before and after the step, outputs of
    the plan's modules and the gradients that cross their borders, the gradient of every parameter, the gradient norm,
    and every weight after the step. Each rank also runs the whole model, so it must fit.

    Every rank of the mesh must call; the mesh must contain every rank of the default group.

    Args:
        model_fn: makes the whole model. Its weights may differ between ranks; those of rank 0 are used.
        plan: the plan.
        mesh: a mesh with the axes of the plan. Its other axes must be data-parallel: the batch is divided over them.
        batch: the whole batch, the same on every rank: keyword arguments of a model that returns `.loss`, or a pair of
            the model's input and targets of a cross-entropy. Every tensor in it has the batch as dim 0.
        loss_fn: model and (local) batch -> mean loss; None: as `batch` says.
        data_parallel: applied to the model after the plan, e.g. `fully_shard` on its layers and on itself. It must
            average gradients over the data-parallel axes. None: gradients are averaged here.
        optimizer_fn: makes the optimizer of both runs. None: SGD with a step of a tenth of the weights' norm.
        dtype: convert model and batch to it; `torch.float64` leaves faults alone with rounding of 1e-15.
        after_apply: called with the planned model before it runs; tests of this function put faults here.

    Raises:
        ConfigurationError: as `apply_plan`, and for a batch that the data-parallel axes do not divide.
        UnsupportedError: the model has active dropout, or the mesh has a `pp`, `cp` or `ep` axis of several ranks that
            is not in the plan.
    """
    axes = _data_axes(plan, mesh)
    model = model_fn()
    if dtype is not None:
        model, batch = model.to(dtype), _converted(batch, dtype)
    _refuse_random(model)
    _make_equal(model, mesh)
    reference = copy.deepcopy(model)
    apply_plan(model, plan, mesh)
    if data_parallel is not None:
        model = data_parallel(model)
    if after_apply is not None:
        after_apply(model)
    loss_of = loss_fn or loss_of_batch
    local_batch = _divided(batch, mesh, axes)
    expected = _step(
        reference, plan, batch, loss_of, _ways_to_reduce(mesh, ()), optimizer_fn, average_gradients=False, step=None
    )
    found = _step(
        model,
        plan,
        local_batch,
        loss_of,
        _ways_to_reduce(mesh, axes),
        optimizer_fn,
        average_gradients=data_parallel is None,
        step=expected.step,
    )
    comparer = Comparer(plan, model, expected, found, mesh, axes, reduction_length=_reduction_length(reference, batch))
    return comparer.report()


# ---------------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class _Average:
    """Averages over the data-parallel ranks."""

    groups: tuple[dist.ProcessGroup, ...]

    def __call__(self, tensor: torch.Tensor, *, but: tuple[dist.ProcessGroup, ...] = ()) -> torch.Tensor:
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        size = 1
        for group in self.groups:
            if group not in but:
                dist.all_reduce(tensor, group=group)
                size *= group.size()
        return tensor / size

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The mean gradient. Experts that got no token on one rank may have got some on another."""
        attached = attached_layout(parameter)
        divided = () if attached is None else attached.norm_groups
        if parameter.grad is None and not any(group in divided for group in self.groups):
            return None
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return self(found, but=divided)


def _ways_to_reduce(mesh: DeviceMesh, axes: tuple[str, ...]) -> _Average:
    return _Average(tuple(mesh.get_group(axis) for axis in axes))


def _step(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    loss_of: LossOf,
    average: _Average,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    *,
    average_gradients: bool,
    step: float | None,
) -> RunResult:
    """One training step; `step` is the learning rate of the default optimizer, None: a tenth of the weights' norm."""
    with traced(model, plan) as trace:
        loss = loss_of(model, batch)
        trace.is_forward = False
        loss.backward()
    parameters = whole_named(model)
    if average_gradients:
        for parameter in model.parameters():
            parameter.grad = average.gradient(parameter)
    gradients = {n: None if p.grad is None else local_tensor(p.grad).detach().clone() for n, p in parameters.items()}
    norm = total_grad_norm(model.parameters()).item()
    if step is None:
        weights = torch.stack([p.detach().double().norm() for p in model.parameters()]).norm().item()
        step = 0.1 * weights / norm if norm else 0.0
    optimizer = optimizer_fn(model.parameters()) if optimizer_fn is not None else SGD(model.parameters(), lr=step)
    optimizer.step()
    optimizer.zero_grad()
    after = {name: local_tensor(p).detach().clone() for name, p in parameters.items()}
    with torch.no_grad():
        loss_after = average(loss_of(model, batch)).item()
    return RunResult(trace, (average(loss).item(), loss_after), norm, gradients, after, step)


# ------------------------------------------------------------------------------------------------------ preparation


def _data_axes(plan: ShardingPlan, mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    if mesh.size() != dist.get_world_size():
        raise ConfigurationError(
            f"validate needs a mesh of all {dist.get_world_size()} ranks, but this one has {mesh.size()}."
        )
    axes = tuple(n for n in names if (n not in plan.axes or n in plan.batch) and mesh[n].size() > 1)
    for axis in axes:
        if axis in ("pp", "cp", "ep") and axis not in plan.axes:
            raise UnsupportedError(
                f"axis {axis} of the mesh has {mesh[axis].size()} ranks and is not in the plan; validate with a mesh "
                "on which it has one."
            )
    return axes


def _refuse_random(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            raise UnsupportedError(
                f"module {name} drops out with probability {module.p}, and the two runs would draw differently; set it "
                "to 0 or call .eval() in model_fn."
            )


@torch.no_grad()
def _make_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank takes the parameters and buffers of the mesh's first rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        whole = tensor.detach().contiguous()
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
        tensor.copy_(whole)


def _converted(batch: Any, dtype: torch.dtype) -> Any:
    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    if isinstance(batch, Mapping):
        return {key: convert(value) for key, value in batch.items()}
    return tuple(convert(value) for value in batch)


def _divided(batch: Any, mesh: DeviceMesh, axes: tuple[str, ...]) -> Any:
    """This rank's part of the batch: dim 0 of every tensor, cut by the axes from left to right."""

    def divide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for axis in axes:
            size = mesh[axis].size()
            if value.shape[0] % size:
                raise ConfigurationError(
                    f"a batch of {value.shape[0]} cannot be divided over the {size} ranks of {axis}; use a multiple."
                )
            value = value.chunk(size)[mesh.get_local_rank(axis)]
        return value

    if isinstance(batch, Mapping):
        return {key: divide(value) for key, value in batch.items()}
    return tuple(divide(value) for value in batch)


def _reduction_length(model: nn.Module, batch: Any) -> int:
    """The longest sum: over the tokens of the batch, or over the widest dim of a parameter."""
    tensors = [v for v in (batch.values() if isinstance(batch, Mapping) else batch) if isinstance(v, torch.Tensor)]
    widest = max((max(p.shape, default=1) for p in model.parameters()), default=1)
    return max(widest, *(tensor.numel() for tensor in tensors))
