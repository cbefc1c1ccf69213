"""Full tensors of a unit in memory that the ranks of the shard group share: one copy for all of them.

A rank publishes its slices of a unit before a forward, and says when it has ended a use of the unit. Nobody overwrites
a slice before every rank has ended every use so far. There are two residences of the shard:

* private: the shard is memory of the rank. It is written into the slice, cast to the compute dtype, before a forward.
* aliased: the shard *is* the slice, so that nothing is copied and weights exist once. The optimizer must announce a
  step, because it overwrites what others may be reading.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hp_plugin.core.fsdp.counters import WaitCause
from hp_plugin.core.fsdp.fulls import FullTensors
from hp_plugin.core.fsdp.parameter import ShardedParameter, install_fulls, install_shards
from hp_plugin.core.fsdp.phase import Phase
from hp_plugin.core.transport import Ticket, lane_of, watch_updates
from hp_plugin.core.transport.shm import Segment, Signals
from hp_plugin.errors import HyperParallelError, UnsupportedError

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root
    from hp_plugin.core.fsdp.unit import Unit


_BYTES_FOR_A_LANE = 64 * 1024
"""A copy of cold memory of this size takes 18 us, handing it to another thread and waiting for it 22 us."""


class SharedFulls(FullTensors):
    """Full tensors in a segment.

    Args:
        unit: The unit.
        index: Its number, which chooses its counters.
        segment: The segment.
        signals: Its counters: row `2 * index` says how often a rank has published its slices, the next one how many
            uses of the unit it has ended.
        offsets: First byte of each full tensor in the segment.
    """

    def __init__(self, unit: Unit, index: int, segment: Segment, signals: Signals, offsets: Sequence[int]) -> None:
        self.index = index
        self._unit = unit
        self._parameters: list[ShardedParameter] = unit.parameters
        self._signals = signals
        self._published, self._released = 2 * index, 2 * index + 1
        self._publications = self._uses = 0
        self._is_pending = False
        self._writing: Ticket | None = None
        self._lane = lane_of(segment.group, "cpu", role="gather")
        self.reader_waits, self.reader_wait_seconds = 0, 0.0
        """How often, and how long, a write had to wait for ranks that still read."""
        self._places = [(*owner, parameter) for parameter in self._parameters for owner in parameter.owners]
        self._with_shard: list[ShardedParameter] = []
        self._own: list[torch.Tensor] = []
        self._full_bytes = self._own_bytes = 0
        for parameter, offset in zip(self._parameters, offsets):
            slot, dtype, rank = parameter.slot, parameter.compute_dtype, segment.rank
            parameter.bind_full(segment.tensor(offset, slot.numel, dtype).view(slot.shape))
            parameter.full_is_shared = True
            self._full_bytes += slot.numel * dtype.itemsize
            if slot.length(rank):
                # Another tensor on the same memory: publishing is no modification that autograd should see.
                writable = segment.tensor(offset, slot.numel, dtype).view(slot.shape)
                self._own.append(writable.narrow(slot.dim, slot.offset(rank), slot.length(rank)))
                self._with_shard.append(parameter)
                self._own_bytes += self._own[-1].numel() * dtype.itemsize
        self._versions = self._sum_of_versions()

    def begin(self, root: Root, *, for_backward: bool) -> bool:
        """As `FullTensors.begin`: publishes this rank's slices, unless forward has."""
        if not for_backward or self._publications == 0:
            self._publish(root)
        self._uses += 1
        self._is_pending = True
        return True

    def _publish(self, root: Root) -> None:
        """Writes this rank's slices and says so: on a lane, unless that costs more than the copy."""
        self._publications += 1
        root.counters.copied_bytes += self._own_bytes
        job = functools.partial(self._write_and_say, self._uses, self._publications)
        if self._own_bytes < _BYTES_FOR_A_LANE:
            job()
        else:
            self._writing = self._lane.submit(job)

    def _write_and_say(self, uses: int, publication: int) -> None:
        self._wait_for_readers(uses)
        if self._own:
            torch._foreach_copy_(self._own, [parameter.local for parameter in self._with_shard])
        self._signals.publish(self._published, publication)

    def _wait_for_readers(self, uses: int) -> None:
        """Waits until every rank has ended the first `uses` uses of the unit."""
        if self._signals.has_reached(self._released, uses):
            return
        start = time.perf_counter()
        what = f"end its last use of unit {self._unit.name}, in forward or backward"
        self._signals.wait(self._released, uses, lambda: what)
        self.reader_waits += 1
        self.reader_wait_seconds += time.perf_counter() - start

    def wait(self, root: Root) -> None:
        """As `FullTensors.wait`: until every rank has published."""
        if not self._is_pending:
            return
        self._is_pending = False
        start = time.perf_counter()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.wait()
        self._signals.wait(
            self._published, self._publications, lambda: f"publish its parameters of unit {self._unit.name} in forward"
        )
        counters = root.counters
        counters.all_gathers += 1
        counters.all_gather_bytes += self._full_bytes
        counters.waited(WaitCause.ALL_GATHER, start)

    def install(self, root: Root, *, is_last_use: bool) -> None:
        """As `FullTensors.install`."""
        install_fulls(self._places)

    def release(self, root: Root, *, keep: int | None) -> None:
        """As `FullTensors.release`: the memory stays, and peers may publish into it. There is nothing to keep."""
        install_shards(self._places)
        if self._sum_of_versions() != self._versions:
            self._refuse_modified()
        self._signals.publish(self._released, self._uses)

    def drop_kept(self) -> None:
        """Nothing is."""

    def _sum_of_versions(self) -> int:
        return sum([parameter.full._version for parameter in self._parameters if parameter.full is not None])

    def _refuse_modified(self) -> None:
        names = [p.name for p in self._parameters if p.full is not None and p.full._version]
        raise UnsupportedError(
            f"a parameter of unit {self._unit.name} (one of {', '.join(names)}) was changed in place while it was "
            "unsharded. In shared memory that changes it for every rank at once. Change the shard instead (the "
            'parameter as it is outside forward and backward, under torch.no_grad()), or use transport="c10d"'
        )


class AliasedFulls(SharedFulls):
    """Full tensors of which this rank's shards are slices.

    Arguments are those of `SharedFulls`. Every rank of the shard group makes it before any of them reads.
    """

    def __init__(self, unit: Unit, index: int, segment: Segment, signals: Signals, offsets: Sequence[int]) -> None:
        super().__init__(unit, index, segment, signals, offsets)
        self._is_announced = True
        self._written: list[int] = []
        with torch.no_grad():
            self._move_in()

    def _move_in(self) -> None:
        """Makes every shard that is not its slice its slice, with its values."""
        for parameter, own in zip(self._with_shard, self._own):
            if parameter.local.data_ptr() != own.data_ptr():
                own.copy_(parameter.local)
                parameter.sharded._local_tensor = own  # type: ignore[attr-defined]
                watch_updates(parameter.sharded, self.before_update)

    def take_in_shards(self, root: Root) -> None:
        """As `FullTensors.take_in_shards`: a replaced shard becomes the slice again."""
        if any(p.local.data_ptr() != own.data_ptr() for p, own in zip(self._with_shard, self._own)):
            self._wait_for_readers(self._uses)
            self._is_announced = True
            with torch.no_grad():
                self._move_in()

    def before_update(self) -> None:
        """An optimizer, or a load, is about to write the shards: waits until every rank has stopped reading.

        Raises:
            HyperParallelError: This rank has not itself ended its use: a backward is missing.
        """
        unit = self._unit
        if unit.phase is not Phase.SHARDED:
            raise HyperParallelError(
                f"unit {unit.name} is {unit.phase.value} while its parameters are about to be written. With "
                'residence="aliased" they are the memory in which all ranks compute: run the backward of every forward '
                "first, reshard() it, or run forwards without a backward under torch.no_grad()"
            )
        self._wait_for_readers(self._uses)
        self._is_announced = True

    def _publish(self, root: Root) -> None:
        versions = self._versions_of_shards()
        if versions != self._written and not self._is_announced:
            raise UnsupportedError(
                f"the parameters of unit {self._unit.name} have been written by something that did not announce it, "
                'while other ranks may have been reading them: residence="aliased" needs HyperAdamW (or '
                'load_state_dict). Use residence="private" with other optimizers'
            )
        self._written, self._is_announced = versions, False
        self._publications += 1
        self._signals.publish(self._published, self._publications)

    def _versions_of_shards(self) -> list[int]:
        return [p.sharded._version + p.local._version for p in self._with_shard]
