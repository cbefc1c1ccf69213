"""Counts DTensors from outside: the benchmark must not believe the engine's own counters.

A DTensor comes into being in one of two ways. Python calls the class (`DTensor.from_local`, `DTensor(local, spec)`),
which goes through `DTensor.__new__`. Or an operation with DTensor arguments returns one, which torch builds in C++
without `__new__`; such an operation is seen by a dispatch mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class DTensorCount:
    """What was seen.

    Attributes:
        constructed: Calls of `DTensor.__new__`, on any thread.
        returned: DTensors returned by operations that were dispatched on this thread.
        operations: Operations dispatched with a DTensor among their arguments or results, on this thread.
    """

    constructed: int = 0
    returned: int = 0
    operations: int = 0

    @property
    def total(self) -> int:
        """DTensors that came into being, one way or the other."""
        return self.constructed + self.returned


class _SeeOperations(TorchDispatchMode):
    def __init__(self, count: DTensorCount) -> None:
        super().__init__()
        self._count = count

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._count.constructed
        result = func(*args, **kwargs)
        # Dispatch of DTensors may itself call the class; those are counted once, as constructed.
        by_class = self._count.constructed - before
        returned = sum(isinstance(leaf, DTensor) for leaf in tree_leaves(result))
        self._count.returned += max(0, returned - by_class)
        if returned or any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self._count.operations += 1
        return result


class count_dtensors:  # noqa: N801  # a context manager, named as a function is
    """Counts the DTensors that come into being while the context is open; `as` gives a live `DTensorCount`.

    Replaces `DTensor.__new__` for the process while it is open, so it does not nest and no two threads may open it.
    """

    def __enter__(self) -> DTensorCount:
        count = DTensorCount()
        self._original = DTensor.__dict__["__new__"]
        build = DTensor.__new__

        def counted(cls: type[DTensor], *args: Any, **kwargs: Any) -> Any:
            count.constructed += 1
            return build(cls, *args, **kwargs)

        DTensor.__new__ = staticmethod(counted)  # type: ignore[method-assign]
        self._mode = _SeeOperations(count)
        self._mode.__enter__()
        return count

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        DTensor.__new__ = self._original  # type: ignore[method-assign]
