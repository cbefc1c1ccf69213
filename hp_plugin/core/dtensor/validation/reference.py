"""What one process computes: every operation of a run of the whole model, with its values and its gradients.

The planned run is compared with this record, operation by operation, so the whole value of a tensor is never guessed
from pieces: sizes that a module takes from its own tensors or counts are those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.core.dtensor.validation.calls import Call, Snapshots, apart, gradients, intercepted
from hp_plugin.core.dtensor.validation.randomness import mask_of, replayed_as
from hp_plugin.errors import UnsupportedError


@dataclass(frozen=True)
class Whole:
    """One tensor as one process has it."""

    value: torch.Tensor
    requires_grad: bool


@dataclass
class OperationRecord:
    """One operation.

    Attributes:
        name: of the operation.
        module: path of the module in which it ran.
        inputs: tensors from before it ran.
        outputs: its results, then inputs that it wrote into.
        cotangents: for each output a random gradient; None where none flows.
        gradients: for each output, what comes back to each differentiable input.
        note: why gradients could not be computed, else empty.
        is_random: it drew random numbers.
        mask: of a dropout, what its input was multiplied with.
        parameters: of a region, the names of its parameters, whose gradients come after those of its inputs.
    """

    name: str
    module: str
    inputs: list[Whole]
    outputs: list[Whole]
    cotangents: list[torch.Tensor | None] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    note: str = ""
    is_random: bool = False
    mask: torch.Tensor | None = None
    parameters: list[str] = field(default_factory=list)

    def place_of(self, parameter: str) -> int:
        """Where the gradient of a region's parameter is."""
        inputs = max((len(found) for found in self.gradients), default=0) - len(self.parameters)
        return inputs + self.parameters.index(parameter)

    def at(self, places: list[int], divisors: list[int]) -> OperationRecord:
        """The same for these differentiable inputs only; their gradients divided."""
        return replace(
            self,
            gradients=[
                [found[place] / divisor for place, divisor in zip(places, divisors, strict=True)] if found else []
                for found in self.gradients
            ],
        )


@dataclass
class EnterRecord:
    """A module was called; `inputs` are those that its plan names."""

    module: str
    inputs: dict[str, Whole]


@dataclass
class LeaveRecord:
    """A module returned."""

    module: str
    outputs: dict[str, Whole]


Record = OperationRecord | EnterRecord | LeaveRecord


class Recorder:
    """Records one run. Used by one thread.

    Args:
        seed: of the random gradients.
    """

    def __init__(self, seed: int = 0) -> None:
        self.records: list[Record] = []
        self.modules: list[str] = []
        self._snapshots = Snapshots()
        self._generator = torch.Generator().manual_seed(seed)
        self._depth = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Recorder]:
        """Records what this thread runs while it lasts."""
        with intercepted(self):
            yield self

    @property
    def is_inside(self) -> bool:
        """Whether an operation or a region runs, of which the parts are not recorded."""
        return self._depth > 0

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def whole(self, tensor: torch.Tensor) -> Whole:
        """`tensor` as it is now."""
        with self._inside():
            return Whole(self._snapshots.of(tensor), tensor.requires_grad)

    def operation(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, native: bool
    ) -> Any:
        """See `Handler`."""
        if self._depth:
            return func(*args, **kwargs)
        if not native and _communicates(func):
            func = _of_one_rank(name, func)
        with self._inside():
            state = torch.get_rng_state()
            mask = mask_of(name, args, kwargs)
            if mask is not None:
                func, args, kwargs = replayed_as(name, args, kwargs, mask)
            call = Call.of(func, args, kwargs, self._snapshots)
            call.run()
            if not call.outputs:
                return call.result
            record = OperationRecord(
                name,
                self.modules[-1] if self.modules else "",
                [Whole(copy, flows) for copy, flows in zip(call.before, call.flows, strict=True)],
                [self.whole(t) for t in call.outputs],
                is_random=not torch.equal(state, torch.get_rng_state()),
                mask=mask,
            )
            if not record.is_random or mask is not None:
                self._differentiate(record, call.repeat)
            self.records.append(record)
        return call.result

    def _differentiate(
        self, record: OperationRecord, repeat: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]
    ) -> None:
        if not any(whole.requires_grad for whole in record.outputs):
            return
        record.cotangents = [self._cotangent(whole) for whole in record.outputs]
        try:
            with apart():
                outputs, leaves = repeat()
                record.gradients = [
                    [] if cotangent is None else gradients(outputs, leaves, index, cotangent)
                    for index, cotangent in enumerate(record.cotangents)
                ]
        except RuntimeError as error:
            record.note = f"its gradient could not be checked: {str(error).splitlines()[0]}"

    def _cotangent(self, whole: Whole) -> torch.Tensor | None:
        if not whole.requires_grad:
            return None
        drawn = torch.randn(whole.value.shape, generator=self._generator, dtype=torch.float64)
        return drawn.to(device=whole.value.device, dtype=whole.value.dtype)

    # ---------------------------------------------------------------- modules

    def module(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        run: Callable[[], Any],
        outputs_of: Callable[[Any], dict[str, torch.Tensor]],
    ) -> Any:
        """One call of a module: its border, and the operations inside."""
        self.records.append(EnterRecord(name, {key: self.whole(t) for key, t in inputs.items()}))
        self.modules.append(name)
        result = run()
        self.modules.pop()
        self.records.append(LeaveRecord(name, {key: self.whole(t) for key, t in outputs_of(result).items()}))
        return result

    def region(
        self,
        name: str,
        label: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, nn.Parameter],
    ) -> Any:
        """A part that is one operation here: tensors among its arguments, and parameters, are its inputs."""
        with self._inside():
            state = torch.get_rng_state()
            call = Call.of(func, args, kwargs, self._snapshots)
            call.run()
            record = OperationRecord(
                label,
                name,
                [Whole(copy, flows) for copy, flows in zip(call.before, call.flows, strict=True)],
                [self.whole(t) for t in call.outputs],
                is_random=not torch.equal(state, torch.get_rng_state()),
            )
            if record.is_random:
                raise UnsupportedError(
                    f"module {name or '(model)'}, {label}: it draws random numbers, and what runs inside is compared "
                    "at its borders only; set dropout to 0 there, or call .eval()."
                )
            used = {name: p for name, p in parameters.items() if p.requires_grad}
            record.parameters = list(used)

            def repeat() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
                outputs, leaves = call.repeat()
                return outputs, [*leaves, *used.values()]

            self._differentiate(record, repeat)
            self.records.append(record)
        return call.result


def _communicates(func: Callable[..., Any]) -> bool:
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(func).startswith(("_c10d_functional", "c10d"))
    return func in _C10D


_C10D = {
    getattr(dist, name)
    for name in (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
        "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast",
    )
    if hasattr(dist, name)
}  # fmt: skip


def _of_one_rank(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """What a collective does in a group of one rank: nothing, to a tensor that it keeps the shape of."""
    kind = name if func in _C10D else name.split(".")[1]
    if func in _C10D and kind in ("all_reduce", "broadcast"):
        return lambda tensor, *args, **kwargs: tensor.add_(0)
    if func not in _C10D and kind in _FUNCTIONAL:
        return lambda tensor, *args, **kwargs: tensor.clone()
    raise UnsupportedError(
        f"{name} is called inside of a module, and what it does in one process is not known; name the module in "
        "`regions`, or give a model for one process as `reference_fn`."
    )


_FUNCTIONAL = ("all_reduce", "wait_tensor", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def writes_of(func: Callable[..., Any], *, native: bool) -> tuple[int, ...]:
    """Inputs that a collective writes into."""
    return (0,) if not native and func in _C10D and func.__name__ in ("all_reduce", "broadcast") else ()
