"""A link between supernodes that is slow, reordered, or closed until the test opens it; and memory that is taken back.

The engine issues its reductions between supernodes with `torch.distributed.all_reduce`. These context managers stand
in its place for one process group and hand out works that complete when the test wants it.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_plugin.core.transport.shm import GradientRing

_GIVE_UP_S = 40.0


@dataclass
class Gate:
    """Closed until `open`. Who waits for `patience_s` forces it open, and that is remembered.

    Attributes:
        patience_s: Seconds that one may have to wait.
        forced: How often it was forced.
    """

    patience_s: float = 10.0
    forced: int = 0
    _open: threading.Event = field(default_factory=threading.Event)

    def open(self, *_: Any) -> None:
        """Lets everyone through, from now on. Takes any arguments, so that it can serve as a hook."""
        self._open.set()

    def close(self) -> None:
        """Makes everyone wait, from now on."""
        self._open.clear()

    def pass_through(self) -> None:
        """Waits until the gate is open."""
        if not self._open.wait(self.patience_s):
            self.forced += 1
            self._open.set()


class LateWork:
    """Stands for an asynchronous all-reduce whose result is not there yet."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> bool:
        """Blocks until the result is in the tensor."""
        if not self.landed.wait(_GIVE_UP_S):
            raise TimeoutError("the slow link never delivered")
        if self.error is not None:
            raise self.error
        return True


class SlowLink:
    """Context manager: asynchronous all-reduces of one group start late and land late, if asked out of order.

    The operand is read at the end of the delay and overwritten at the landing, so that a buffer which is reused or
    freed meanwhile shows. A thread per link issues the collectives in order of submission.

    Args:
        group: Process group of the link; other groups are left alone.
        seed: Of the delays. May differ between ranks.
        delay_s: Longest delay of one reduction.
        reorder: Whether results land in pairs swapped, where the next reduction is there in time.
        gate: Passed before each landing.
        on_submit: Called with each operand, on the thread that submits it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        seed: int = 0,
        delay_s: float = 0.01,
        reorder: bool = True,
        gate: Gate | None = None,
        on_submit: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.group = group
        self.landings: list[int] = []
        """Numbers of the reductions, in the order in which they landed."""
        self.submitted = 0
        """Reductions submitted so far."""
        self._delay_s = delay_s
        self._reorder = reorder
        self._gate = gate
        self._on_submit = on_submit
        self._random = random.Random(seed)
        self._jobs: queue.SimpleQueue[tuple[int, Tensor, Any, LateWork] | None] = queue.SimpleQueue()
        self._pending: list[LateWork] = []

    def __enter__(self) -> SlowLink:
        self._original = dist.all_reduce
        self._thread = threading.Thread(target=self._carry, name="slow-link", daemon=True)
        self._thread.start()
        dist.all_reduce = self._all_reduce
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_reduce = self._original
        self._jobs.put(None)
        self._thread.join()

    def _all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if self.group is None or group is not self.group:
            return self._original(tensor, op=op, group=group, async_op=async_op)
        if not async_op:
            for work in self._pending:
                work.wait()
            return self._original(tensor, op=op, group=group)
        if self._on_submit is not None:
            self._on_submit(tensor)
        work = LateWork()
        self._pending = [each for each in self._pending if not each.landed.is_set()] + [work]
        self._jobs.put((self.submitted, tensor, op, work))
        self.submitted += 1
        return work

    def _carry(self) -> None:
        """Runs on the thread of the link."""
        held: _Arrival | None = None
        with torch.no_grad():
            while True:
                try:
                    job = self._jobs.get(timeout=0.02 if held else None)
                except queue.Empty:
                    self._land(held)
                    job = held = None
                    continue
                if job is None:
                    self._land(held)
                    return
                time.sleep(self._random.random() * self._delay_s)
                arrival = self._transfer(*job)
                del job  # whatever this thread holds on to would look like memory of the engine
                if self._reorder and held is None:
                    held = arrival
                else:
                    self._land(arrival)
                    self._land(held)
                    held = None
                del arrival

    def _transfer(self, number: int, tensor: Tensor, op: Any, work: LateWork) -> _Arrival:
        result = tensor.clone()
        try:
            self._original(result, op=op, group=self.group)
        except BaseException as error:
            work.error = error
        return _Arrival(number, work, [tensor, result])

    def _land(self, arrival: _Arrival | None) -> None:
        if arrival is None:
            return
        if self._gate is not None:
            self._gate.pass_through()
        arrival.tensors[0].copy_(arrival.tensors[1])
        arrival.tensors.clear()
        self.landings.append(arrival.number)
        arrival.work.landed.set()


@dataclass
class _Arrival:
    """A reduction that is done and whose result has not landed: the operand and the result."""

    number: int
    work: LateWork
    tensors: list[Tensor]


class _GatedWork:
    def __init__(self, work: Any, gate: Gate) -> None:
        self._work, self._gate = work, gate

    def wait(self, *args: Any) -> Any:
        """Waits for the gate, then for the message."""
        self._gate.pass_through()
        return self._work.wait(*args)


@contextlib.contextmanager
def gated_sums(gates: Sequence[Gate]) -> Iterator[list[int]]:
    """Whoever adds up the k-th reduce-scatter of this rank waits for `gates[k]` first.

    On gloo that is who waits for the message of a peer, of which each of these has one; in shared memory it is who adds
    up an entry of the ring. Both run on a thread of their own. Yields a list that grows with every such sum.
    """
    recv, add_up = dist.ProcessGroup.recv, GradientRing.add_up
    begun: list[int] = []

    def next_gate() -> Gate:
        begun.append(len(begun))
        return gates[begun[-1]]

    def gated_recv(group: dist.ProcessGroup, *args: Any) -> Any:
        work = recv(group, *args)
        if threading.current_thread().name != "hyperfsdp-reduce":
            return work
        return _GatedWork(work, next_gate())

    def gated_add_up(ring: GradientRing, *args: Any) -> None:
        next_gate().pass_through()
        add_up(ring, *args)

    dist.ProcessGroup.recv = gated_recv  # type: ignore[method-assign, assignment]
    GradientRing.add_up = gated_add_up  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        # Not `recv` itself: read from its class it no longer binds the group.
        dist.ProcessGroup.recv = lambda group, *args: recv(group, *args)  # type: ignore[method-assign, assignment]
        GradientRing.add_up = add_up  # type: ignore[method-assign]


def take_freed_memory(modules: Sequence[nn.Module], sizes: Sequence[int]) -> None:
    """Makes backward of each module allocate buffers of `sizes` elements, fill them with nan and free them.

    Memory that the engine dropped while something still reads or writes it is then overwritten.
    """

    def noise(_gradient: Tensor) -> None:
        for size in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                for tensor in [torch.empty(size, dtype=dtype) for _ in range(2)]:
                    tensor.fill_(float("nan"))

    def watch(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(noise)

    for module in modules:
        module.register_forward_hook(watch)
