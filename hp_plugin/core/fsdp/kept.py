"""What a unit keeps of its full tensors between forward and backward where `reshard_after_forward` is a number N.

The shard group is cut into groups of N consecutive ranks. After forward each rank keeps one N-th of every full tensor,
in the compute dtype, and backward gathers inside its small group: more memory than sharding over the whole group, less
than keeping everything, and fewer or nearer peers to gather from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.operand import Operand
from hp_plugin.core.fsdp.parameter import MeshInfo
from hp_plugin.core.transport import C10dTransport
from hp_plugin.errors import ConfigurationError


def normalized_reshard(value: bool | int | None, shard_size: int) -> bool | int | None:
    """`reshard_after_forward` with the numbers that mean all or nothing as booleans.

    Args:
        value: What was asked for.
        shard_size: Size of the shard group.

    Returns:
        None, a bool, or a divisor of `shard_size` strictly between 1 and `shard_size`.

    Raises:
        ConfigurationError: If it is neither None, a bool nor a divisor of `shard_size`.
    """
    if value is None or isinstance(value, bool):
        return value
    if type(value) is not int or value < 1 or shard_size % value:
        divisors = ", ".join(str(n) for n in range(1, shard_size + 1) if shard_size % n == 0)
        raise ConfigurationError(
            f"reshard_after_forward={value!r}: expected True, False or a number of ranks that divides the "
            f"{shard_size} of the shard group ({divisors})"
        )
    if value == 1:
        return False  # every rank keeps everything
    return True if value == shard_size else value


def small_group(info: MeshInfo, size: int) -> dist.ProcessGroup:
    """Makes the group of `size` consecutive ranks of the shard group that this rank is in.

    Every rank of the shard group must call, in the same order; the other ranks of the job need not.
    """
    ranks = dist.get_process_group_ranks(info.shard_group)
    start = dist.get_rank(info.shard_group) // size * size
    group = dist.new_group(
        ranks[start : start + size], backend=dist.get_backend(info.shard_group), use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


class KeptParts:
    """One N-th of the full tensors of a unit.

    Args:
        operands: The operands of the unit.
        transport: Collectives of a group of N ranks, see `small_group`.
    """

    def __init__(self, operands: Sequence[Operand], transport: C10dTransport) -> None:
        self.transport = transport
        self._operands = operands
        self._size = transport.group.size()
        self._rank = transport.group.rank()
        self._parts: list[torch.Tensor] = []

    @property
    def is_held(self) -> bool:
        """Whether there is something to gather from."""
        return bool(self._parts)

    def keep(self, counters: Counters) -> None:
        """Copies this rank's part out of the full tensors, which hold their values. Replaces what was kept."""
        fulls = [operand.full for operand in self._operands]
        parts = [full.view(self._size, -1)[self._rank] for full in fulls]
        if not self._parts:
            self._parts = [torch.empty_like(part) for part in parts]
        torch._foreach_copy_(self._parts, parts)
        counters.copied_bytes += sum(part.numel() * part.dtype.itemsize for part in parts)

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates the full tensors and returns (outputs, inputs) of the all-gather in the small group."""
        return [operand.begin_refill() for operand in self._operands], self._parts

    def drop(self) -> None:
        """Frees what is kept."""
        self._parts = []
