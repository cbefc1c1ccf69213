"""What a collective of a unit carries: one parameter without a copy, or all tiny parameters of a dtype in one pack.

A collective costs about as much for a kilobyte as for a hundred, so norms and biases travel together. For everything
larger the operand of the collective *is* the storage: the shard is the input and the full tensor the output.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import torch

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.parameter import ShardedParameter, install_fulls, install_shards
from hp_plugin.core.fsdp.slot import aligned_offsets
from hp_plugin.core.kernels import scale_copy_

PACK_BYTES = 64 * 1024
"""Parameters whose full tensor, padded and in the compute dtype, is smaller than this travel in packs."""

_ALIGNMENT = 32
"""Elements. Full tensors of a pack start at multiples of 64 bytes in every floating dtype of two bytes or more."""

Gradients = Sequence[torch.Tensor | None]
"""One per parameter of an operand, of its full shape; None stands for zeros."""


def group_operands(parameters: Sequence[ShardedParameter]) -> list[Operand]:
    """Distributes parameters over operands, in order of each operand's first parameter.

    It follows from order, shapes, dims, dtypes and the size of the shard group alone, so all ranks agree on it and it
    may be called for any subset of a unit. With one rank in the shard group nothing is packed. No communication.

    Args:
        parameters: Parameters of one unit.
    """
    groups: dict[object, list[ShardedParameter]] = {}
    for index, parameter in enumerate(parameters):
        slot = parameter.slot
        is_tiny = slot.group_size > 1 and slot.padded_numel * parameter.compute_dtype.itemsize < PACK_BYTES
        groups.setdefault(parameter.compute_dtype if is_tiny else index, []).append(parameter)
    return [Pack(group) if len(group) > 1 else Single(group[0]) for group in groups.values()]


class Operand(abc.ABC):
    """One operand of a unit's collectives, and the storage of the full tensors of its parameters.

    The elements that one rank contributes to a gather, or gets from a reduction, are its *slot*: the padded slots of
    its parameters one after another. A gathered or unreduced operand is the slots of all ranks in rank order.

    Full tensors are views of one buffer with a stable address: `release_full` empties its storage, `begin_gather`
    refills it. Everything is written through an alias with a version counter of its own, because refilling what
    autograd has saved is no modification.

    Attributes:
        parameters: The parameters, in the order of their slots.
        slot_numel: Elements of one rank's slot.
        slot_offsets: First element of each parameter in the slot.
        dtype: Compute dtype, that of the full tensors.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = list(parameters)
        self.dtype = parameters[0].compute_dtype
        self.slot_offsets, self.slot_numel = aligned_offsets([p.slot.slot_numel for p in parameters], 1)
        self._info = parameters[0].info
        self._places = [(*owner, parameter) for parameter in parameters for owner in parameter.owners]
        self._full: torch.Tensor | None = None
        self._storage: torch.UntypedStorage | None = None
        self._nbytes = 0

    # ---- shard -> full ----------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def full_bytes(self) -> int:
        """Bytes that the full tensors occupy while they are gathered."""

    @abc.abstractmethod
    def begin_gather(self, counters: Counters) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Allocates the full tensors and returns (output, input) of their all-gather, contiguous and 1-D.

        Returns None where nothing has to be gathered. Neither this nor the other methods that move parameters need
        `torch.no_grad()`: no tensor that they touch requires a gradient.
        """

    @abc.abstractmethod
    def finish_gather(self, counters: Counters) -> None:
        """Completes the full tensors after the all-gather and puts them into the modules."""

    @property
    def full(self) -> torch.Tensor:
        """The buffer of the full tensors, 1-D, the group size divides its length. Holds values while gathered."""
        assert self._full is not None
        return self._full

    def begin_refill(self) -> torch.Tensor:
        """Allocates the full tensors again, for a gather that writes all of `full`, and returns `full`."""
        assert self._storage is not None
        self._storage.resize_(self._nbytes)
        return self.full

    def finish_refill(self) -> None:
        """Puts the refilled full tensors into the modules."""
        install_fulls(self._places)

    def release_full(self) -> None:
        """Puts the shards back into the modules and frees the full tensors. Keeps their `.grad`."""
        install_shards(self._places)
        if self._storage is not None:
            self._storage.resize_(0)

    def _allocate(self, numel: int) -> torch.Tensor:
        """The buffer of the full tensors with its memory in place: 1-D, `numel` elements, free of autograd."""
        if self._full is None or self._storage is None:
            buffer = torch.empty(numel, dtype=self.dtype, device=self._info.device)
            self._bind(buffer)
            self._full = buffer.data  # unlike detach(): a version counter of its own
            self._storage = buffer.untyped_storage()
            self._nbytes = numel * self.dtype.itemsize
        else:
            self._storage.resize_(self._nbytes)
        return self._full

    @abc.abstractmethod
    def _bind(self, buffer: torch.Tensor) -> None:
        """Makes the full tensor of every parameter a view of `buffer`."""

    # ---- gradient -> slots ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def reduction_operand(
        self, gradients: Gradients, dtype: torch.dtype, counters: Counters, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Full gradients as the input of a reduce-scatter. Call under `torch.no_grad()`.

        Args:
            gradients: One per parameter, of its full shape and any dtype; None stands for zeros.
            dtype: Dtype of the result.
            counters: Where copies are counted.
            out: Where the result is to be written. None: it may share memory with a gradient.

        Returns:
            Contiguous, 1-D, group size times `slot_numel` elements; `out` where it is given.
        """

    def write_for_peers(
        self, gradients: Gradients, dtype: torch.dtype, counters: Counters, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Full gradients as what the peers read in shared memory. Call under `torch.no_grad()`.

        Args:
            gradients: As for `reduction_operand`.
            dtype: Dtype of `out`.
            counters: Where copies are counted.
            out: Gets the slots of all other ranks, and this rank's own where no gradient holds it as it is to be added.

        Returns:
            This rank's own slot, contiguous, 1-D, `slot_numel` elements: in `out`, or in a gradient, which it keeps
            alive.
        """
        self.reduction_operand(gradients, dtype, counters, out=out)
        return out.narrow(0, self._info.shard_rank * self.slot_numel, self.slot_numel)


class Single(Operand):
    """One parameter. Nothing is copied unless its dtype changes, its dim is uneven or it is sharded on another dim.

    Args:
        parameter: The parameter.
    """

    def __init__(self, parameter: ShardedParameter) -> None:
        super().__init__([parameter])
        self._parameter = parameter
        self._staging: torch.Tensor | None = None

    @property
    def full_bytes(self) -> int:
        """Bytes of the full tensor, padding included; 0 where it is the shard itself."""
        return 0 if self._parameter.is_alias else self._full_numel * self.dtype.itemsize

    @property
    def _full_numel(self) -> int:
        slot = self._parameter.slot
        return slot.padded_numel if slot.is_row_major else _round_up(slot.numel, slot.group_size)

    def begin_gather(self, counters: Counters) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The input is the shard where it can be, else its own slot of the output, into which it is cast or padded."""
        parameter = self._parameter
        if parameter.is_alias:
            parameter.alias_full()
            return None
        slot, rank, local = parameter.slot, self._info.shard_rank, parameter.local
        output = self._allocate(self._full_numel)
        if not slot.is_row_major:
            output = self._staging = torch.empty(slot.padded_numel, dtype=self.dtype, device=self._info.device)
        if local.dtype == self.dtype and slot.length(rank) == slot.chunk and slot.group_size > 1:
            # A shard that was replaced or transposed by the user may have strides of its own.
            return output, local.contiguous().view(-1)
        own = output.narrow(0, rank * slot.slot_numel, slot.slot_numel)
        own.view(slot.slot_shape).narrow(slot.dim, 0, slot.length(rank)).copy_(local)
        counters.copied_bytes += local.numel() * self.dtype.itemsize
        return (output, own) if slot.group_size > 1 else None

    def finish_gather(self, counters: Counters) -> None:
        """Copies a shard on a dim other than 0 out of its staging tensor."""
        parameter = self._parameter
        if self._staging is not None:
            assert self._full is not None
            slots = self._staging.view(parameter.slot.group_size, self.slot_numel)
            for target, source in _rank_pieces(parameter, self._full, slots):
                target.copy_(source)
            counters.copied_bytes += parameter.slot.numel * self.dtype.itemsize
            self._staging = None
        install_fulls(self._places)

    def release_full(self) -> None:
        """As `Operand.release_full`; drops a staging tensor of a gather that was not finished."""
        self._staging = None
        super().release_full()

    def _bind(self, buffer: torch.Tensor) -> None:
        slot = self._parameter.slot
        self._parameter.bind_full(buffer.narrow(0, 0, slot.numel).view(slot.shape))

    def reduction_operand(
        self, gradients: Gradients, dtype: torch.dtype, counters: Counters, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient itself where dtype, strides and evenness allow and it may stay, else one copy."""
        return self._parameter.reduction_operand(gradients[0], dtype, counters, out=out)

    def write_for_peers(
        self, gradients: Gradients, dtype: torch.dtype, counters: Counters, *, out: torch.Tensor
    ) -> torch.Tensor:
        """Leaves this rank's own slot in the gradient where dtype, strides and evenness allow."""
        gradient = gradients[0]
        if gradient is None or not self._parameter.is_operand(gradient, dtype):
            return super().write_for_peers(gradients, dtype, counters, out=out)
        operand = gradient.detach().view(-1)
        start = self._info.shard_rank * self.slot_numel
        end = start + self.slot_numel
        for low, high in ((0, start), (end, operand.numel())):
            if low < high:
                scale_copy_(out[low:high], operand[low:high], 1.0)
        counters.copied_bytes += (operand.numel() - self.slot_numel) * dtype.itemsize
        return operand[start:end]


class Pack(Operand):
    """Several tiny parameters of one dtype: one collective, one copy on each side of it.

    Args:
        parameters: Two or more parameters with the same compute dtype and mesh.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        super().__init__(parameters)
        self._offsets, end = aligned_offsets([p.slot.numel for p in parameters], _ALIGNMENT)
        self._full_numel = _round_up(end, self._info.shard_size)
        self._numel = sum(p.slot.numel for p in parameters)
        self._is_on_rows = all(p.slot.dim == 0 for p in parameters)
        rank = self._info.shard_rank
        self._with_shard = [p for p in parameters if p.slot.length(rank)]
        self._shard_numel = sum(math.prod(p.slot.local_shape(rank)) for p in parameters)
        self._packed: torch.Tensor | None = None
        self._packed_storage: torch.UntypedStorage | None = None
        self._own: torch.Tensor | None = None
        self._copy_in: list[torch.Tensor] = []
        self._copy_out: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    @property
    def full_bytes(self) -> int:
        """Bytes of the full tensors and the gaps between them, without the packed copy that lives during a gather."""
        return self._full_numel * self.dtype.itemsize

    def begin_gather(self, counters: Counters) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies all shards into this rank's slot, which is the input. The full tensors follow in `finish_gather`."""
        packed_numel = self._info.shard_size * self.slot_numel
        if self._packed is None:
            full = self._allocate(self._full_numel)
            self._packed = torch.empty(packed_numel, dtype=self.dtype, device=self._info.device)
            self._packed_storage = self._packed.untyped_storage()
            self._map_copies(full, self._packed)
        elif self._packed_storage is not None:
            self._packed_storage.resize_(packed_numel * self.dtype.itemsize)
        assert self._own is not None
        if self._with_shard:
            torch._foreach_copy_(self._copy_in, [p.local for p in self._with_shard])
            counters.copied_bytes += self._shard_numel * self.dtype.itemsize
        return self._packed, self._own

    def _map_copies(self, full: torch.Tensor, packed: torch.Tensor) -> None:
        """Makes the views between which a gather copies; they stay valid when the storages are emptied and refilled."""
        slots = packed.view(self._info.shard_size, self.slot_numel)
        self._own = slots[self._info.shard_rank]
        targets, sources = self._copy_out
        for parameter, start, offset in zip(self.parameters, self._offsets, self.slot_offsets):
            slot = parameter.slot
            own = self._own.narrow(0, offset, slot.slot_numel).view(slot.slot_shape)
            if length := slot.length(self._info.shard_rank):
                self._copy_in.append(own.narrow(slot.dim, 0, length))
            mine = full.narrow(0, start, slot.numel)
            for target, source in _rank_pieces(parameter, mine, slots.narrow(1, offset, slot.slot_numel)):
                targets.append(target)
                sources.append(source)

    def finish_gather(self, counters: Counters) -> None:
        """Copies the full tensors out of the packed one, which is freed."""
        self._allocate(self._full_numel)
        torch._foreach_copy_(*self._copy_out)
        counters.copied_bytes += self._numel * self.dtype.itemsize
        self._release_packed()
        install_fulls(self._places)

    def release_full(self) -> None:
        """As `Operand.release_full`; drops the packed tensor of a gather that was not finished."""
        self._release_packed()
        super().release_full()

    def _release_packed(self) -> None:
        if self._packed_storage is not None:
            self._packed_storage.resize_(0)

    def _bind(self, buffer: torch.Tensor) -> None:
        for parameter, start in zip(self.parameters, self._offsets):
            slot = parameter.slot
            parameter.bind_full(buffer.narrow(0, start, slot.numel).view(slot.shape))

    def reduction_operand(
        self, gradients: Gradients, dtype: torch.dtype, counters: Counters, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The slots of all gradients side by side: one copy, where a gradient is missing or on an inner dim two."""
        size = self._info.shard_size
        present = [gradient for gradient in gradients if gradient is not None] if self._is_on_rows else []
        is_complete = len(present) == len(gradients)
        for index, strided in enumerate(present):
            if not strided.is_contiguous():  # torch 2.7 cannot chunk other strides
                present[index] = strided.contiguous()
                counters.copied_bytes += strided.numel() * strided.dtype.itemsize
        if is_complete and dtype != self.dtype and self._info.device.type == "cpu":
            # There a cast inside `_chunk_cat` takes three times as long as one after it.
            packed = torch._chunk_cat(present, 0, size)
            counters.copied_bytes += packed.numel() * (packed.dtype.itemsize + dtype.itemsize)
            return packed.to(dtype).view(-1) if out is None else out.copy_(packed.view(-1))
        if out is None:
            packed = torch.empty((size, self.slot_numel), dtype=dtype, device=self._info.device)
        else:
            packed = out.view(size, self.slot_numel)
        counters.copied_bytes += packed.numel() * dtype.itemsize
        if is_complete:
            torch._chunk_cat(present, 0, size, out=packed)  # pads with zeros and casts
            return packed.view(-1)
        pieces = []
        for parameter, gradient in zip(self.parameters, gradients):
            slot = parameter.slot
            if gradient is not None and slot.is_row_major and slot.is_even and gradient.is_contiguous():
                pieces.append(gradient.view(size, -1))  # cast on the way into the pack
            else:
                pieces.append(parameter.reduction_operand(gradient, dtype, counters).view(size, -1))
        torch.cat(pieces, dim=1, out=packed)
        return packed.view(-1)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _rank_pieces(
    parameter: ShardedParameter, full: torch.Tensor, slots: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equally shaped views, (part of the full tensor, part of the slots), that cover the parameter once.

    Args:
        parameter: The parameter.
        full: Its elements, 1-D, at least `slot.numel`.
        slots: Its slots, (group size, `slot.slot_numel`), possibly with strides.
    """
    slot = parameter.slot
    if slot.is_row_major:
        whole, rest = divmod(slot.numel, slot.slot_numel)
        end = whole * slot.slot_numel
        pairs = [(full[:end].view(whole, slot.slot_numel), slots[:whole])] if whole else []
        return [*pairs, (full[end : end + rest], slots[whole, :rest])] if rest else pairs
    full = full[: slot.numel].view(slot.shape)
    pairs = []
    for rank in range(slot.group_size):
        if length := slot.length(rank):
            source = slots[rank].view(slot.slot_shape).narrow(slot.dim, 0, length)
            pairs.append((full.narrow(slot.dim, slot.offset(rank), length), source))
    return pairs
