"""One call of an operation: its tensors before and after, and how to repeat it on others.

Operations are seen where Python calls torch, above autograd: a `TorchFunctionMode` sees every function of torch, and
`autograd.Function.apply`, which no mode sees, is wrapped while a model is followed.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "real", "imag", "data"}
"""Properties of a tensor that are operations."""

_NO_OPERATIONS = {
    "__set__", "__delete__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "__len__", "__bool__",
    "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "grad", "numel",
    "size", "dim", "stride", "is_floating_point", "is_contiguous", "get_device", "data_ptr", "item", "tolist",
    "set_default_device", "is_grad_enabled", "broadcast_tensors_shapes",
}  # fmt: skip
"""Functions that compute no tensor, or none that autograd follows."""


_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Functions that give memory as it is; it is filled with zeros here, so that there is something to compare."""


def name_of(func: Callable[..., Any]) -> str:
    """A name of an operation for people, the same for the same function."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(func).removesuffix(".default")
    name = getattr(func, "__name__", repr(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        return name if name in _TENSOR_PROPERTIES else "__set__"
    return str(name)


def is_native(func: Callable[..., Any]) -> bool:
    """Whether `func` is torch's own, whose backward does what its forward implies; no collective, no custom kernel."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(func).startswith("aten.")
    return not (getattr(func, "__module__", None) or "torch").startswith("torch.distributed")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples, lists, mappings and slices, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """`value` with its tensors replaced by those given, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(with_tensors(item, tensors) for item in (value.start, value.stop, value.step)))
    return value


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written by operations; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


class Snapshots:
    """Copies of tensors as they are now; one for each state of a tensor."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A detached copy."""
        known = self._kept.get(tensor)
        version = version_of(tensor)
        if known is None or known[0] != version:
            with torch.no_grad():
                known = (version, tensor.detach().clone())
            self._kept[tensor] = known
        copy: torch.Tensor = known[1]
        return copy


@dataclass
class Call:
    """A call before and after it ran.

    Attributes:
        inputs: its tensors, in the order of the arguments.
        before: copies of them from before the call.
        flows: which of them needed gradients then; a write in place may change that.
        outputs: tensors of the result, then inputs that it wrote into.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    before: list[torch.Tensor]
    flows: list[bool]
    result: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], snapshots: Snapshots) -> Call:
        """The call, not yet run."""
        inputs = list(tensors_in((args, kwargs)))
        return cls(func, args, kwargs, inputs, [snapshots.of(t) for t in inputs], [t.requires_grad for t in inputs])

    def run(self, writes: Sequence[int] = ()) -> None:
        """Runs it. `writes`: inputs that it writes into without torch counting."""
        versions = [version_of(t) for t in self.inputs]
        self.result = self.func(*self.args, **self.kwargs)
        self.mutated = [
            i
            for i, (t, v) in enumerate(zip(self.inputs, versions, strict=True))
            if (version_of(t) != v or i in writes) and not any(t is other for other in self.inputs[:i])
        ]
        self.outputs = self._outputs(self.result, self.inputs)

    def _outputs(self, result: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = list(tensors_in(result))
        return found + [inputs[i] for i in self.mutated if not any(inputs[i] is t for t in found)]

    def repeat(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs it again on copies. Returns outputs, and the leaves that stand for inputs that need gradients."""
        leaves: list[torch.Tensor] = []
        stand_ins: list[torch.Tensor] = []
        for index, (copy, flows) in enumerate(zip(self.before, self.flows, strict=True)):
            stand_in = copy.detach()
            if flows:
                stand_in = stand_in.requires_grad_()
                leaves.append(stand_in)
            if index in self.mutated:
                stand_in = stand_in.clone()
            stand_ins.append(stand_in)
        args, kwargs = with_tensors((self.args, self.kwargs), iter(stand_ins))
        return self._outputs(self.func(*args, **kwargs), stand_ins), leaves


def gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], which: int, cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """Of one output, times `cotangent`, by each leaf; zeros where there is no path."""
    followed = [i for i, t in enumerate(outputs) if t.requires_grad]
    found = torch.autograd.grad(
        [outputs[i] for i in followed],
        list(leaves),
        [cotangent if i == which else torch.zeros_like(outputs[i]) for i in followed],
        retain_graph=True,
        allow_unused=True,
    )
    return [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(found, leaves, strict=True)]


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """For repetitions: gradients are on, and hooks that keep what the real forward saves do not see them."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


class Handler(Protocol):
    """Who is told of operations."""

    def operation(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, native: bool
    ) -> Any:
        """Runs one operation and returns its result."""
        ...


class Interceptor(TorchFunctionMode):
    """Tells a handler of every operation that Python asks torch for."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _NO_OPERATIONS or _inside_transform():
            return func(*args, **kwargs)
        if name in _UNWRITTEN:
            with torch.no_grad():  # a leaf may require a gradient
                return func(*args, **kwargs).zero_()
        return self._handler.operation(name, func, args, kwargs, native=is_native(func))


def _inside_transform() -> bool:
    """Whether torch.func (vmap, grad) is at work; its tensors must not leave it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_told: contextvars.ContextVar[Handler | None] = contextvars.ContextVar("hp_told_of_functions", default=None)
_lock = threading.Lock()
_wrapped = 0
_original: Any = None


@contextlib.contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    """While it lasts, `handler` is told of what this thread asks torch for, `autograd.Function`s included."""
    token = _told.set(handler)
    _wrap_functions()
    try:
        with Interceptor(handler):
            yield
    finally:
        _unwrap_functions()
        _told.reset(token)


def _wrap_functions() -> None:
    # `apply` is a class method of Python that no mode sees. The wrapper acts in threads that follow a model only, and
    # goes when the last of them has finished.
    global _wrapped, _original
    with _lock:
        _wrapped += 1
        if _wrapped > 1:
            return
        _original = torch.autograd.Function.__dict__["apply"]
        inner = _original.__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            handler = _told.get()
            if handler is None or cls.__module__.startswith("torch._functorch"):
                return inner(cls, *args, **kwargs)
            return handler.operation(cls.__name__, lambda *a, **k: inner(cls, *a, **k), args, kwargs, native=False)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]


def _unwrap_functions() -> None:
    global _wrapped, _original
    with _lock:
        _wrapped -= 1
        if not _wrapped:
            torch.autograd.Function.apply = _original  # type: ignore[method-assign]
            _original = None
