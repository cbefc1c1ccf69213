"""Simulated ranks: a mesh of threads in one process, with process groups that hand tensors over in memory."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.dtensor.validation.arrangement import Grid
from hp_plugin.core.dtensor.validation.exchange import Meeting, ThreadExchange
from hp_plugin.errors import UnsupportedError


class _Done:
    """A collective of threads has ended when it returns."""

    def wait(self, *_: Any) -> bool:
        return True


_ProcessGroup: Any = dist.ProcessGroup  # whose signatures differ between releases


class SimulatedGroup(_ProcessGroup):
    """The ranks of one line of a `SimulatedMesh`. Reductions add in the order of ranks.

    Tensors on the `meta` device have no values: shapes are checked and nobody is waited for.
    """

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self._position, self._count, self._meeting = rank, size, meeting

    def rank(self) -> int:
        """Position in the line."""
        return self._position

    def size(self) -> int:
        """Ranks in the line."""
        return self._count

    def name(self) -> str:
        """For torch's messages."""
        return "simulated"

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_meta:
            return [tensor] * self._count
        return self._meeting.exchange(self._position, tensor.detach().clone())

    @torch.no_grad()
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        """As torch's."""
        for tensor in tensors:
            tensor.detach().copy_(_reduced(self._all(tensor), dist.ReduceOp.SUM if opts is None else opts.reduceOp))
        return _Done()

    @torch.no_grad()
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        """As torch's; `rootRank` counts within the line."""
        for tensor in tensors:
            tensor.detach().copy_(self._all(tensor)[0 if opts is None else opts.rootRank])
        return _Done()

    @torch.no_grad()
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        """As torch's."""
        for output, value in zip(outputs, inputs, strict=True):
            for into, part in zip(output, self._all(value), strict=True):
                into.detach().copy_(part)
        return _Done()

    @torch.no_grad()
    def all_gather_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> _Done:
        """As torch's."""
        output.detach().view(-1).copy_(torch.cat([part.reshape(-1) for part in self._all(value)]))
        return _Done()

    @torch.no_grad()
    def reduce_scatter_single(self, output: torch.Tensor, value: torch.Tensor, opts: Any = None) -> _Done:
        """As torch's."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        pieces = [part.reshape(-1).chunk(self._count)[self._position] for part in self._all(value)]
        output.detach().view(-1).copy_(_reduced(pieces, op))
        return _Done()

    @torch.no_grad()
    def all_to_all_single(
        self, output: torch.Tensor, value: torch.Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> _Done:
        """As torch's, along dim 0."""
        if value.is_meta:
            return _Done()
        parts = self._meeting.exchange(self._position, (value.detach().clone(), list(send)))
        mine = [
            (tensor.split(sizes) if sizes else tensor.chunk(self._count))[self._position] for tensor, sizes in parts
        ]
        output.detach().copy_(torch.cat(mine).view_as(output))
        return _Done()

    @torch.no_grad()
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        """As torch's."""
        everyone = self._meeting.exchange(self._position, [tensor.detach().clone() for tensor in inputs])
        for into, theirs in zip(outputs, everyone, strict=True):
            into.detach().copy_(theirs[self._position])
        return _Done()

    def barrier(self, opts: Any = None) -> _Done:
        """As torch's."""
        self._meeting.exchange(self._position, None)
        return _Done()

    # Older releases of torch call the same by other names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _reduced(values: list[torch.Tensor], op: Any) -> torch.Tensor:
    result = values[0].clone()
    for value in values[1:]:
        if op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG:
            result += value
        elif op == dist.ReduceOp.MAX:
            result = torch.maximum(result, value)
        elif op == dist.ReduceOp.MIN:
            result = torch.minimum(result, value)
        elif op == dist.ReduceOp.PRODUCT:
            result *= value
        else:
            raise UnsupportedError(f"simulated ranks do not reduce by {op}; run the validation in several processes.")
    return result / len(values) if op == dist.ReduceOp.AVG else result


class SimulatedMesh:
    """What `apply_plan` asks of a `DeviceMesh`, for one simulated rank.

    Args:
        grid: as the rank sees it.
        meetings: axis and the coordinate of a line -> where its ranks meet.
    """

    def __init__(self, grid: Grid, meetings: Mapping[tuple[str, tuple[int, ...]], Meeting]) -> None:
        self._grid = grid
        self.mesh_dim_names = grid.axes
        self._groups = {
            axis: SimulatedGroup(at, size, meetings[axis, _line(grid.coordinate, position)])
            for position, (axis, size, at) in enumerate(zip(grid.axes, grid.sizes, grid.coordinate, strict=True))
        }

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks, counted in row-major order."""
        return torch.arange(self._grid.size).view(self._grid.sizes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._grid.axes)

    def _get_root_mesh(self) -> SimulatedMesh:
        """The mesh that this one is a part of, as of a `DeviceMesh`: itself."""
        return self

    def size(self, axis: int | None = None) -> int:
        """Ranks along one axis, or of the mesh."""
        return self._grid.size if axis is None else self._grid.sizes[axis]

    def get_group(self, axis: str) -> SimulatedGroup:
        """The rank's line along `axis`."""
        return self._groups[axis]

    def get_local_rank(self, axis: str) -> int:
        """The rank's coordinate on `axis`."""
        return self._grid.coordinate[self._grid.axes.index(axis)]


def _line(coordinate: tuple[int, ...], position: int) -> tuple[int, ...]:
    return (*coordinate[:position], 0, *coordinate[position + 1 :])


class SimulatedRanks:
    """All ranks of a plan's axes as threads.

    Args:
        axes: axis -> number of ranks.
        timeout_s: how long a rank waits for another one in a collective.
        seed: every rank draws its random numbers from this seed, as processes that are seeded alike do.
    """

    def __init__(self, axes: Mapping[str, int], *, timeout_s: float = 60.0, seed: int = 0) -> None:
        first = Grid(tuple(axes), tuple(axes.values()), (0,) * len(axes))
        self._meeting = Meeting(first.size, timeout_s)
        self._lines = {
            (axis, _line(coordinate, position)): Meeting(size, timeout_s)
            for position, (axis, size) in enumerate(axes.items())
            for coordinate in first.coordinates
            if coordinate[position] == 0
        }
        lock = threading.Lock()
        self.exchanges = [
            ThreadExchange(first.at(coordinate), self._meeting, lock, seed) for coordinate in first.coordinates
        ]
        self.meshes = [SimulatedMesh(exchange.grid, self._lines) for exchange in self.exchanges]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls `function(rank)` on every rank at once; the results by rank.

        Raises:
            Exception: what the first rank that failed raised; the others are woken up.
        """
        size = len(self.exchanges)
        results: list[Any] = [None] * size
        failures: list[tuple[float, int, BaseException]] = []
        order = itertools.count()
        grad = torch.is_grad_enabled()

        def body(rank: int) -> None:
            try:
                with torch.set_grad_enabled(grad):
                    results[rank] = function(rank)
            except BaseException as error:  # whatever it is, the other threads wait for this one
                failures.append((next(order), rank, error))
                for meeting in [self._meeting, *self._lines.values()]:
                    meeting.abort()

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(body, rank), name=f"simulated rank {rank}")
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            own = [f for f in failures if not isinstance(f[2], threading.BrokenBarrierError)]
            raise min(own or failures, key=lambda f: f[1] if own else f[0])[2]
        return results
