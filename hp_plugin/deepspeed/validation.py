"""`"mode": "validation"`: the first steps of a job against the same steps of its unsharded model in one process.

Every rank keeps an unsharded copy of the model. What goes into the engine's forward and the gradients that come back to
its outputs are recorded; before the optimizer's step, all ranks run the copy on the micro-batches of all of them, and
hand it the same gradients. So it does not matter where the job computes its loss. Outputs, gradients, their norm, and
the weights after the step must be equal (`docs/deepspeed.md`).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hp_plugin.core.dtensor.compare import first_wrong
from hp_plugin.core.dtensor.report import Comparison, Kind, ValidationReport, locate
from hp_plugin.core.dtensor.tolerance import FLOOR, relative_error, tolerance
from hp_plugin.core.layout import AttachedLayout, Layout, local_tensor
from hp_plugin.core.optim import HyperAdamW
from hp_plugin.deepspeed import reporting
from hp_plugin.deepspeed.access import full_value
from hp_plugin.errors import HyperParallelError, UnsupportedError


class ValidationError(HyperParallelError):
    """The job and one process do not compute the same."""


@dataclass
class MicroBatch:
    """One call of the engine's forward.

    Attributes:
        args: Positional arguments.
        kwargs: The others.
        outputs: Its tensors, in order.
        gradients: What came back to them; None to those that have had none.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def copy_of(model: nn.Module) -> nn.Module:
    """The unsharded model of one process; to be called before it is sharded.

    Raises:
        UnsupportedError: The model cannot be compared; the message names why and what to do.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UnsupportedError(
            '"hyperfsdp.mode" "validation" compares with the whole model on every rank, which deepspeed.zero.Init does '
            "not make; build a smaller model without it for the validation."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedError(
                f'{name} is active dropout, so "hyperfsdp.mode" "validation" would compare two different draws; set '
                "dropout to 0 for the validation."
            )
        if (getattr(module, "ep_size", 1) or 1) > 1:
            raise UnsupportedError(
                f'{name} spreads experts over {module.ep_size} ranks, which "hyperfsdp.mode" "validation" cannot put '
                "into one process; use ep_size 1 for the validation."
            )
    return copy.deepcopy(model)


class Validation:
    """Compares steps of an engine with those of one process.

    Args:
        alone: From :func:`copy_of`.
        steps: How many are compared.
        compute_dtype: Of the engine; None in fp32.
    """

    def __init__(self, alone: nn.Module, *, steps: int, compute_dtype: torch.dtype | None) -> None:
        self._alone = alone if compute_dtype is None else alone.to(compute_dtype)
        self._left = steps
        self._dtype = compute_dtype
        self._seen: list[MicroBatch] = []

    @property
    def is_over(self) -> bool:
        """Whether no further step is to be compared."""
        return self._left == 0

    def saw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Notes a forward pass of the engine that backward will follow."""
        outputs = list(_tensors(output))
        if not any(tensor.requires_grad for tensor in outputs):
            return
        noted = MicroBatch(
            _kept(args), dict(_kept(kwargs)), [t.detach().clone() for t in outputs], [None] * len(outputs)
        )
        for number, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_noting(noted.gradients, number))
        self._seen.append(noted)

    def forget(self) -> None:
        """Drops what was noted, where a step is skipped."""
        self._seen.clear()

    @contextlib.contextmanager
    def step(self, model: nn.Module, optimizer: Any, *, norm: float, clip: float, scale: float) -> Iterator[None]:
        """Around clipping and the optimizer's step. Every rank must call.

        Args:
            model: Sharded, with the gradients of all micro-batches, reduced and unscaled.
            optimizer: The torch optimizer.
            norm: Of all gradients.
            clip: The largest norm; 0 for no clipping.
            scale: Of the loss.

        Raises:
            ValidationError: The steps differ; the message is the report.
        """
        parameters = dict(model.named_parameters())
        self._load(parameters)
        outputs = self._run()
        gradients = {
            name: None if parameter.grad is None else parameter.grad.float() / scale
            for name, parameter in self._alone.named_parameters()
        }
        twin = _Twin.of(optimizer, parameters, dict(self._alone.named_parameters()))
        compared = _Compared(parameters, gradients, self._limit(parameters))
        found = [*outputs, *compared.gradients()]
        yield
        whole = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values() if g is not None))
        found.append(compared.scalar("grad_norm", "gradient norm", norm, whole))
        if twin is not None:
            found += compared.weights(twin.step(gradients, whole, clip))
        self._finish(found, twin is not None)

    def _load(self, parameters: Mapping[str, nn.Parameter]) -> None:
        with torch.no_grad():
            for name, own in self._alone.named_parameters():
                own.copy_(full_value(parameters[name]))
                own.grad = None

    def _run(self) -> list[Comparison]:
        """The micro-batches of all ranks through the copy; compares the outputs of those of this rank."""
        seen, self._seen = self._seen, []
        everyone: list[Any] = [None] * dist.get_world_size()
        on_host = [
            replace(each, args=_moved(each.args, "cpu"), kwargs=_moved(each.kwargs, "cpu"), outputs=[]) for each in seen
        ]
        dist.all_gather_object(everyone, on_host)
        device = next(self._alone.parameters()).device
        limit = tolerance(self._dtype or torch.float32, _tokens(seen))
        found: list[Comparison] = []
        for rank, batches in enumerate(everyone):
            for number, batch in enumerate(batches):
                output = self._alone(*_moved(batch.args, device), **_moved(batch.kwargs, device))
                tensors = list(_tensors(output))
                pairs = [(t, g.to(device) / len(everyone)) for t, g in zip(tensors, batch.gradients) if g is not None]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                if rank == dist.get_rank():
                    for place, (expected, got) in enumerate(zip(tensors, seen[number].outputs, strict=True)):
                        name = f"output {place} of micro-batch {number + 1}"
                        found.append(_comparison("output", name, "", got, expected.detach(), limit, 0.0))
        return found

    def _limit(self, parameters: Mapping[str, nn.Parameter]) -> float:
        widest = max((max(p.shape, default=1) for p in parameters.values()), default=1)
        return tolerance(self._dtype or torch.float32, max(widest, 1024))

    def _finish(self, found: Sequence[Comparison], knows_weights: bool) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(found))
        worst: dict[tuple[Kind, str], Comparison] = {}
        for comparison in (each for of_rank in everyone for each in of_rank):
            place = comparison.kind, comparison.name
            if place not in worst or comparison.error > worst[place].error or math.isnan(comparison.error):
                worst[place] = comparison
        ordered = sorted(worst.values(), key=lambda c: -c.error / c.tolerance)
        location, reason = locate(
            [c for c in worst.values() if c.kind == "output"], [c for c in worst.values() if c.kind == "gradient"]
        )
        report = ValidationReport(tuple(ordered), location, reason, (0.0, 0.0), (0.0, 0.0), "the job")
        self._left -= 1
        if not report.is_equal:
            raise ValidationError(str(report))
        text = report.summary()
        if not knows_weights:
            text += " Weights after the step were not compared: the optimizer is not one of torch.optim or HyperAdamW."
        reporting.say(f"validation: {text}")
        if self.is_over:
            reporting.say("validation is over; the job goes on as in production, with the weights that it has.")


class _Compared:
    """Compares sharded parameters with those of one process."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], expected: Mapping[str, torch.Tensor | None], limit: float
    ) -> None:
        self._parameters, self._expected, self._limit = parameters, expected, limit
        total = sum(g.double().square().sum().item() for g in expected.values() if g is not None)
        self._floor = FLOOR * math.sqrt(total)

    def gradients(self) -> list[Comparison]:
        """Of every parameter, the rows of this rank."""
        found = []
        for name, parameter in self._parameters.items():
            expected, grad = self._expected[name], parameter.grad
            if expected is None and grad is None:
                continue
            got = torch.zeros_like(local_tensor(parameter)) if grad is None else local_tensor(grad)
            wanted = torch.zeros_like(got) if expected is None else _rows(parameter, expected)
            found.append(_comparison("gradient", name, name.rpartition(".")[0], got, wanted, self._limit, self._floor))
        return found

    def weights(self, expected: Mapping[str, torch.Tensor]) -> list[Comparison]:
        """After the step, where a gradient is more than rounding: of the rest, Adam makes steps as long as of any."""
        floor = FLOOR * math.sqrt(sum(w.double().square().sum().item() for w in expected.values()))
        found = []
        for name, whole in expected.items():
            gradient = self._expected[name]
            if gradient is not None:
                least = self._limit * max(gradient.abs().max().item(), self._floor)
                known = (gradient.abs() > least) | (gradient == 0)
            else:
                known = torch.ones_like(whole, dtype=torch.bool)
            parameter = self._parameters[name]
            rows = _rows(parameter, known)
            got, wanted = local_tensor(parameter).detach().float() * rows, _rows(parameter, whole) * rows
            found.append(_comparison("weight", name, name.rpartition(".")[0], got, wanted, self._limit, floor))
        return found

    def scalar(self, kind: Kind, name: str, got: float, wanted: float) -> Comparison:
        """One number."""
        return _comparison(kind, name, "", torch.tensor(got), torch.tensor(wanted), self._limit, 0.0)


@dataclass
class _Twin:
    """The same optimizer over the whole fp32 weights of one process.

    Attributes:
        optimizer: Over `weights`.
        weights: By name.
    """

    optimizer: torch.optim.Optimizer
    weights: dict[str, nn.Parameter]

    @classmethod
    def of(
        cls, optimizer: Any, parameters: Mapping[str, nn.Parameter], alone: Mapping[str, nn.Parameter]
    ) -> _Twin | None:
        """None where the optimizer is of a kind of which no other can be made. Every rank must call."""
        kind = torch.optim.AdamW if type(optimizer) is HyperAdamW else type(optimizer)
        if not kind.__module__.startswith("torch.optim"):
            return None
        names = {id(parameter): name for name, parameter in parameters.items()}
        weights = {
            names[id(p)]: nn.Parameter(full_value(p).detach().float().clone())
            for group in optimizer.param_groups
            for p in group["params"]
        }
        known = kind([nn.Parameter(torch.zeros(1))]).defaults
        groups = [
            {
                **{option: value for option, value in group.items() if option in known},
                "params": [weights[names[id(p)]] for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        made = kind(groups)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
                if state:
                    made.state[weights[names[id(parameter)]]] = state
        return cls(made, weights)

    def step(self, gradients: Mapping[str, torch.Tensor | None], norm: float, clip: float) -> dict[str, torch.Tensor]:
        """The weights after a step with these gradients."""
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for name, weight in self.weights.items():
            gradient = gradients[name]
            weight.grad = None if gradient is None else gradient * factor
        self.optimizer.step()
        return {name: weight.detach() for name, weight in self.weights.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _rows(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor that is laid out like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    return AttachedLayout(Layout.from_dtensor(parameter), tuple(coordinate), groups).take(whole)


def _comparison(
    kind: Kind, name: str, module: str, found: torch.Tensor, expected: torch.Tensor, limit: float, floor: float
) -> Comparison:
    made = Comparison(kind, name, module, 0.0, limit, dist.get_rank())
    if found.shape != expected.shape:
        return replace(made, error=math.inf, detail=f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    error = relative_error(found, expected.to(found.device), floor)
    detail = "" if error <= limit else first_wrong(found.float(), expected.float().to(found.device), limit)
    return replace(made, error=error, detail=detail)


def _noting(kept: list[torch.Tensor | None], number: int) -> Callable[[torch.Tensor], None]:
    def note(gradient: torch.Tensor) -> None:
        kept[number] = gradient.detach().cpu()

    return note


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating tensors in an output, in a fixed order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _moved(value: Any, device: Any) -> Any:
    """The same nested value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _kept(value: Any) -> Any:
    """The same nested value with copies of its tensors, which the caller may change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_kept(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tokens(seen: Sequence[MicroBatch]) -> int:
    return max((output.numel() for each in seen for output in each.outputs), default=1)
