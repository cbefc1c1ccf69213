"""What can go wrong between ranks that share memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from hp_plugin.errors import HyperParallelError


class SharedMemoryError(HyperParallelError, RuntimeError):
    """Shared memory cannot be made or used; raised alike on every rank of the group that asked for it."""


class PeerError(HyperParallelError, RuntimeError):
    """A rank that shares memory with this one has ended, is stuck, or does something else."""


def named(group: dist.ProcessGroup, ranks: Iterable[int]) -> str:
    """Ranks of `group` as they are called in the job: "rank 3", or "ranks 1, 3 and 5"."""
    names = [str(dist.get_global_rank(group, rank)) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
