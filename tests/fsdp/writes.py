"""Every byte that the engine writes outside of autograd's own compute, and what the formula says about it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Kind of each operator that writes memory. An operator that the engine adds must be put into one of these sets.
KINDS = {
    **dict.fromkeys(("copy_", "_to_copy", "clone", "cat", "_chunk_cat", "_foreach_copy_"), "moves"),
    **dict.fromkeys(("add", "add_", "sum"), "sums"),
    **dict.fromkeys(("mul", "mul_", "_foreach_mul_"), "scales"),
    **dict.fromkeys(("zero_", "zeros", "zeros_like", "fill_"), "fills"),
}
_VIEWS = (
    "alias as_strided detach empty empty_like empty_strided expand narrow new_empty new_empty_strided permute select "
    "slice split split_with_sizes squeeze t transpose unbind unsqueeze view _unsafe_view"
)
WRITES_NOTHING = frozenset(_VIEWS.split())
PACK_BYTES = 64 * 1024  # parameters of less travel in packs
ALIGNMENT = 32  # elements

Key = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


class WriteLog(TorchDispatchMode):
    """Context manager that counts operators with the shapes and dtypes of what they write."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # the engine's lanes run under this mode too
        self.calls: Counter[Key] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        namespace, name = func._schema.name.split("::")
        if namespace == "aten" and name not in WRITES_NOTHING:
            writes = kwargs.get("out", args[0] if name.endswith("_") else result)
            operands = tuple((tuple(t.shape), t.dtype) for t in _tensors([writes]))
            if operands:
                with self._lock:
                    self.calls[name, operands] += 1
        return result

    def bytes_beyond(self, compute: WriteLog) -> Counter[str]:
        """Bytes written by kind, less what `compute` has written too. Raises for an operator of unknown kind."""
        found: Counter[str] = Counter()
        for (name, operands), count in (self.calls - compute.calls).items():
            if name not in KINDS:
                raise AssertionError(f"the engine runs {name} on {operands}: say in KINDS what it writes")
            found[KINDS[name]] += count * sum(math.prod(shape) * dtype.itemsize for shape, dtype in operands)
        return +found


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass(frozen=True)
class Piece:
    """One parameter as the formula sees it.

    Attributes:
        shape: Of the full parameter, two dims at most.
        dim: The sharded dim.
        ranks: Size of the shard group.
        rank: In the shard group.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int
    rank: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk(self) -> int:
        return math.ceil(self.shape[self.dim] / self.ranks)

    @property
    def slot(self) -> int:
        """Elements that travel for this rank."""
        return self.chunk * self.numel // self.shape[self.dim]

    @property
    def own(self) -> int:
        """Elements of this rank's shard."""
        rows = min((self.rank + 1) * self.chunk, self.shape[self.dim]) - min(
            self.rank * self.chunk, self.shape[self.dim]
        )
        return rows * self.numel // self.shape[self.dim]

    @property
    def is_even(self) -> bool:
        return self.shape[self.dim] % self.ranks == 0

    @property
    def is_inner(self) -> bool:
        """Sharded on a dim other than the first, so that a gather does not leave the parameter in one piece."""
        return self.dim > 0 and self.ranks > 1


@dataclass(frozen=True)
class Dtypes:
    """Of one configuration: shards, full parameters, sums, and what crosses between supernodes."""

    master: torch.dtype
    compute: torch.dtype
    sums: torch.dtype
    wire: torch.dtype


class UnitFormula:
    """What one unit writes and sends, in closed form.

    Args:
        pieces: Its parameters.
        dtypes: Of the configuration.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: Dtypes) -> None:
        self.dtypes = dtypes
        self.ranks = pieces[0].ranks
        tiny = [p for p in pieces if self.ranks > 1 and p.slot * p.ranks * dtypes.compute.itemsize < PACK_BYTES]
        self.pack = tiny if len(tiny) > 1 else []
        self.singles = [p for p in pieces if p not in self.pack]

    @property
    def operand_slots(self) -> list[int]:
        """Elements that travel for this rank, by operand."""
        return [p.slot for p in self.singles] + ([sum(p.slot for p in self.pack)] if self.pack else [])

    @property
    def flat(self) -> int:
        """Elements of its slice of the gradient buffer: slots at multiples of the alignment."""
        return sum(math.ceil(slot / ALIGNMENT) * ALIGNMENT for slot in self.operand_slots)

    @property
    def gaps(self) -> int:
        """Elements between the slots."""
        return self.flat - sum(self.operand_slots)

    def gather(self) -> Counter[str]:
        """Writes of one all-gather."""
        is_cast = self.dtypes.master != self.dtypes.compute
        moved = 0
        for piece in self.singles:
            if is_cast or piece.ranks > 1:
                moved += piece.own  # cast, or copied by the rank itself, into its slot of the full tensor
            if piece.is_inner:
                moved += piece.numel
        moved += sum(p.own + p.numel for p in self.pack)
        return Counter(moves=moved * self.dtypes.compute.itemsize)

    def publish(self) -> int:
        """Bytes that a rank writes into shared memory for a forward."""
        return sum(p.own for p in (*self.singles, *self.pack)) * self.dtypes.compute.itemsize

    def write_into_ring(self) -> int:
        """Bytes copied to make the operands of a reduction in shared memory.

        Singles without the rank's own slot, which the sum reads where autograd left it, but whole where they are not
        slots as they are; packs as elsewhere.
        """
        is_cast = self.dtypes.sums != self.dtypes.compute
        moved = 0
        for piece in self.singles:
            are_slots = piece.is_even and not piece.is_inner and not is_cast
            moved += piece.numel - piece.slot if are_slots else piece.numel
        alone = moved * self.dtypes.sums.itemsize
        return alone + UnitFormula(self.pack, self.dtypes).reduce()["moves"] if self.pack else alone

    def reduce(self) -> Counter[str]:
        """Writes of one reduce-scatter: making its operands, and adding up what arrives."""
        size = self.dtypes.sums.itemsize
        moved = filled = 0
        # A pack of rows is padded and packed in one write and cast, if need be, in another. One with an inner dim is
        # packed of pieces, which need a copy of their own where they are not slots already.
        in_pieces = self.pack if any(p.is_inner for p in self.pack) else []
        for piece in [*self.singles, *in_pieces]:
            is_cast = piece in self.singles and self.dtypes.sums != self.dtypes.compute
            if piece.is_inner or not piece.is_even or is_cast:
                moved += piece.numel
            filled += piece.slot * piece.ranks - piece.numel
        packed = self.ranks * sum(p.slot for p in self.pack)
        moved += packed
        is_cast_after = self.dtypes.sums != self.dtypes.compute and not in_pieces
        unpacked = packed * self.dtypes.compute.itemsize if is_cast_after else 0
        if self.ranks == 1:
            moved += sum(self.operand_slots)  # into the gradient buffer
        added = (self.ranks - 1) * sum(self.operand_slots)
        return +Counter(moves=moved * size + unpacked, fills=filled * size, sums=added * size)

    def cross(self) -> Counter[str]:
        """Writes around the reduction between supernodes: a cast each way where it travels in another dtype."""
        if self.dtypes.wire == self.dtypes.sums:
            return Counter()
        return Counter(moves=self.flat * (self.dtypes.wire.itemsize + self.dtypes.sums.itemsize))

    def sent_by_gather(self) -> int:
        return (self.ranks - 1) * sum(self.operand_slots) * self.dtypes.compute.itemsize

    def sent_by_reduce(self) -> int:
        return (self.ranks - 1) * sum(self.operand_slots) * self.dtypes.sums.itemsize
