"""How many bytes each collective puts on the links inside and between supernodes, under a stated cost model.

Ring collectives: the ranks of a group form a ring in group order, and a rank sends to its successor only. With n ranks
and B bytes per full tensor, every directed edge of the ring carries

    all-reduce                    2 (n-1)/n B
    all-gather, reduce-scatter      (n-1)/n B     B is the gathered, or the unreduced, tensor
    broadcast                                B    on all edges but the one into the source
    reduce                                   B    on all edges but the one out of the root

All-to-all, scatter, gather, send: each message goes straight from its source to its destination. A receive counts
nothing: its sender counts.

Each rank counts what it sends itself, so the sum over ranks is the total of the job. The edge is "intra" if its two
ends share a supernode, else "inter".

These are the bytes of the algorithm named, not a measurement. Gloo, for one, runs a reduce-scatter as an all-reduce and
really moves the bytes of one; trees and hierarchical algorithms of other back ends move other amounts as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hp_plugin.core.topology.topology import Topology

Message = tuple[int, float]  # position of the receiver in the group, bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sent (or, after `+` over ranks, that all of them sent).

    Attributes:
        intra_bytes: bytes to ranks of the same supernode.
        inter_bytes: bytes to ranks of other supernodes.
        calls: number of collective calls by operation, e.g. `{"all_gather": 12}`; a coalesced call counts once.
        unmodelled: communicating operations that were seen but are not in the model, by their torch name. The byte
            counts are complete only if this is empty.
    """

    intra_bytes: int = 0
    inter_bytes: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    unmodelled: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.intra_bytes + other.intra_bytes,
            self.inter_bytes + other.inter_bytes,
            dict(Counter(self.calls) + Counter(other.calls)),
            dict(Counter(self.unmodelled) + Counter(other.unmodelled)),
        )


class TrafficRecorder(TorchDispatchMode):
    """Context manager that counts the collectives which the calling thread, or a lane for it, issues on this rank.

    It sees collectives where they pass torch's dispatcher: calls of `torch.distributed`, of process group methods and
    functional collectives, in forward and in backward. It sees other Python threads where they enter it, as the
    engine's lanes do with the modes of whoever submits a job, and does not see shared memory.
    Every operator that the thread runs takes a detour through Python meanwhile, so measure time in another run.

    Args:
        topology: which ranks share a supernode.

    Example:
        with TrafficRecorder(topology) as recorder:
            train_step()
        print(recorder.traffic)
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology
        self._lock = threading.Lock()
        self._bytes = {True: 0.0, False: 0.0}  # by "same supernode"; exact fractions are rounded once, when read
        self._calls: Counter[str] = Counter()
        self._unmodelled: Counter[str] = Counter()

    @property
    def traffic(self) -> Traffic:
        """What has been counted so far."""
        intra, inter = round(self._bytes[True]), round(self._bytes[False])
        return Traffic(intra, inter, dict(self._calls), dict(self._unmodelled))

    def reset(self) -> None:
        """Forgets what has been counted."""
        self._bytes = {True: 0.0, False: 0.0}
        self._calls.clear()
        self._unmodelled.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional"):
            with self._lock:
                self._count(name, func._schema, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, name: str, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _SILENT:
            return
        if name not in _OPERATIONS:
            self._unmodelled[name] += 1
            return
        operation, messages = _OPERATIONS[name]
        self._calls[operation] += 1
        arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        ranks, position = _group_of(arguments)
        for receiver, size in messages(_Call(arguments, len(ranks), position)):
            if receiver == position:  # a rank's own part never leaves it
                continue
            same = self._topology.is_within_supernode((ranks[position], ranks[receiver]))
            self._bytes[same] += size


@dataclass(frozen=True)
class _Call:
    """One call: its arguments by name, the size of its group and the caller's position in it."""

    arguments: dict[str, Any]
    size: int
    position: int

    @property
    def successor(self) -> int:
        return (self.position + 1) % self.size

    def bytes_of(self, *names: str) -> int:
        """Total bytes of the tensors in the first of these arguments that the call has."""
        name = next(name for name in names if name in self.arguments)
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.arguments[name]))


def _all_reduce(call: _Call) -> Iterator[Message]:
    yield call.successor, 2 * (call.size - 1) / call.size * call.bytes_of("tensors", "input", "inputs")


def _all_gather(call: _Call) -> Iterator[Message]:
    # Counted from the input: (n-1)/n of the gathered tensor is n-1 times this rank's part.
    part = call.bytes_of("input_tensors", "input_tensor", "input_list", "inputs", "input")
    yield call.successor, (call.size - 1) * part


def _reduce_scatter(call: _Call) -> Iterator[Message]:
    whole = call.bytes_of("input_tensors", "input_tensor", "inputs", "input")
    yield call.successor, (call.size - 1) / call.size * whole


def _broadcast(call: _Call) -> Iterator[Message]:
    root = call.arguments.get("root_rank", call.arguments.get("src"))
    if call.successor != root:
        yield call.successor, call.bytes_of("tensors", "input")


def _reduce(call: _Call) -> Iterator[Message]:
    if call.position != call.arguments["root_rank"]:
        yield call.successor, call.bytes_of("tensors")


def _send(call: _Call) -> Iterator[Message]:
    yield call.arguments["dst"], call.bytes_of("tensors", "tensor")


def _scatter(call: _Call) -> Iterator[Message]:
    if call.position == call.arguments["root_rank"]:
        for receiver, tensor in enumerate(_tensors(call.arguments["input_tensors"])):
            yield receiver, tensor.numel() * tensor.element_size()


def _gather(call: _Call) -> Iterator[Message]:
    yield call.arguments["root_rank"], call.bytes_of("input_tensors")


def _all_to_all_list(call: _Call) -> Iterator[Message]:
    for receiver, tensor in enumerate(_tensors(call.arguments["input_tensors"])):
        yield receiver, tensor.numel() * tensor.element_size()


def _all_to_all_single(call: _Call) -> Iterator[Message]:
    tensor = call.arguments["input"]
    total = tensor.numel() * tensor.element_size()
    splits = [int(split) for split in call.arguments["input_split_sizes"]] or [1] * call.size  # none: equal parts
    for receiver, split in enumerate(splits):
        yield receiver, total * split / max(sum(splits), 1)


def _nothing(call: _Call) -> Iterator[Message]:
    return iter(())


_Model = Callable[[_Call], Iterator[Message]]

# torch's operator name -> (name in Traffic.calls, messages that the calling rank sends). Names of torch 2.7 to 2.13.
_OPERATIONS: dict[str, tuple[str, _Model]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), ("all_reduce", _all_reduce)),
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced"), ("all_reduce", _all_reduce)),
    "all_reduce_coalesced_": ("all_reduce", _all_reduce),
    **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_coalesced_"), ("all_gather", _all_gather)),
    **dict.fromkeys(("allgather_into_tensor_coalesced_", "all_gather_into_tensor"), ("all_gather", _all_gather)),
    **dict.fromkeys(("all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"), ("all_gather", _all_gather)),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_"), ("reduce_scatter", _reduce_scatter)),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor"), ("reduce_scatter", _reduce_scatter)),
    "reduce_scatter_tensor_out": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _reduce_scatter),
    "alltoall_base_": ("all_to_all", _all_to_all_single),
    "all_to_all_single": ("all_to_all", _all_to_all_single),
    "alltoall_": ("all_to_all", _all_to_all_list),
    **dict.fromkeys(("broadcast_", "broadcast"), ("broadcast", _broadcast)),
    "reduce_": ("reduce", _reduce),
    "scatter_": ("scatter", _scatter),
    "gather_": ("gather", _gather),
    **dict.fromkeys(("send", "isend"), ("send", _send)),
    **dict.fromkeys(("recv_", "recv_any_source_", "irecv"), ("recv", _nothing)),
    **dict.fromkeys(("barrier", "monitored_barrier_"), ("barrier", _nothing)),
}
_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})  # neither sends nor receives


def _group_of(arguments: Mapping[str, Any]) -> tuple[Sequence[int], int]:
    """Global ranks of the call's group, in group order, and the caller's position among them."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    assert isinstance(group, dist.ProcessGroup)
    return dist.get_process_group_ranks(group), dist.get_rank(group)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor or in nested lists of tensors, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
