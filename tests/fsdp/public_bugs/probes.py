"""What a step dispatches, which collectives a rank enters, and what stays alive, seen from outside the engine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class DTensorWork:
    """DTensors that were constructed, and operators that were dispatched with a DTensor among their operands."""

    constructed: int = 0
    dispatched: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def count_dtensor_work() -> Iterator[DTensorWork]:
    """Counts what happens inside on this thread, and on lanes that take over its dispatch modes."""
    work = DTensorWork()
    new = DTensor.__new__

    def counting(cls: type, *args: Any, **kwargs: Any) -> Any:
        work.constructed += 1
        return new(cls, *args, **kwargs)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(each, DTensor) for each in types):
                work.dispatched[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    DTensor.__new__ = counting  # type: ignore[method-assign, assignment]
    try:
        with Watch():
            yield work
    finally:
        DTensor.__new__ = new  # type: ignore[method-assign]


@dataclass(frozen=True)
class Collective:
    """One call that a rank made.

    Attributes:
        group: Global ranks of its group.
        operation: Torch's operator name.
        operands: Shape and dtype of every tensor argument.
    """

    group: tuple[int, ...]
    operation: str
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]


Channel = tuple[int, int, int]


class CollectiveLog(TorchDispatchMode):
    """Context manager that lists the collectives of this rank, group by group, and its messages, channel by channel.

    A channel is (sender, receiver, tag). The order between groups, and between channels, is not recorded: it depends on
    threads, and nothing hangs on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_group: dict[tuple[int, ...], list[Collective]] = {}
        self.sent: dict[Channel, list[Collective]] = {}
        self.received: dict[Channel, list[Collective]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            values = [*args, *kwargs.values()]
            group = next(dist.ProcessGroup.unbox(v) for v in values if _is_group(v))
            ranks = tuple(dist.get_process_group_ranks(group))
            operands = tuple((tuple(t.shape), t.dtype) for t in _tensors(values))
            if name in ("send", "recv_"):
                peer, tag = ranks[values[-2]], values[-1]
                mine = dist.get_rank()
                ends = (mine, peer) if name == "send" else (peer, mine)
                kept = self.sent if name == "send" else self.received
                kept.setdefault((*ends, tag), []).append(Collective(ranks, "message", operands))
            else:
                self.by_group.setdefault(ranks, []).append(Collective(ranks, name, operands))
        return func(*args, **kwargs)


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("c10d.ProcessGroup")


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def forget_what_is_alive() -> None:
    """Leaves everything that exists now out of later `live_bytes`: the modules of torch take long to look through."""
    gc.collect()
    gc.freeze()


def live_bytes() -> int:
    """Bytes of all storages that Python holds through a tensor. Tensors that only autograd holds are not seen."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), Tensor) or isinstance(candidate, DTensor):
            continue
        if candidate.device.type == "cpu" and candidate.layout == torch.strided:
            storage = candidate.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def settled_live_bytes() -> int:
    """`live_bytes` once it no longer changes: lanes give up what they hold a moment after their peers have answered."""
    found = [live_bytes()]
    while len(found) < 4 or len(set(found[-3:])) > 1:
        if len(found) == 100:
            raise AssertionError(f"live memory does not settle: {found[-10:]}")
        time.sleep(0.02)
        found.append(live_bytes())
    return found[-1]
