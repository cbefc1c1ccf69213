"""All ranks of a mesh as threads of one process, with the real optimizer, plan and messages on each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.optimizer import HyperMuon
from hp_plugin.core.muon.plan import ExchangePlan
from hp_plugin.core.transport import Pending

TIMEOUT_S = 60.0


class Board:
    """Where the ranks leave what they send. A failure of one of them ends the waits of all."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._posts: dict[object, dict[int, Any]] = {}
        self.failure: BaseException | None = None

    def post(self, key: object, rank: int, value: Any) -> None:
        with self._condition:
            self._posts.setdefault(key, {})[rank] = value
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._condition:
            self.failure = self.failure or error
            self._condition.notify_all()

    def take(self, key: object, ranks: Sequence[int]) -> list[Any]:
        """The posts of all ranks, once they are there."""
        with self._condition:
            done = self._condition.wait_for(
                lambda: self.failure is not None or len(self._posts.get(key, {})) == len(ranks), TIMEOUT_S
            )
            if self.failure is not None:
                raise RuntimeError("another rank failed") from self.failure
            assert done, f"a rank did not take part in collective {key}: {sorted(self._posts.get(key, {}))} did"
            return [self._posts[key][rank] for rank in ranks]


class _Later(Pending):
    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__((), ())
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class SimulatedCommunicator:
    """Collectives over a board."""

    def __init__(self, board: Board, ranks: tuple[int, ...], rank: int) -> None:
        self._board, self.ranks, self._rank = board, ranks, rank
        self.position = ranks.index(rank)
        self._numbers = itertools.count()

    def _exchange(self, kind: str, value: Any) -> Callable[[], list[Any]]:
        key = (self.ranks, next(self._numbers), kind)
        self._board.post(key, self._rank, value)
        return lambda: self._board.take(key, self.ranks)

    def all_to_all(self, output: Tensor, source: Tensor, counts: tuple[list[int], list[int]]) -> Pending:
        take = self._exchange("all-to-all", (source.clone(), counts[1]))

        def finish() -> None:
            parts = [sent.split(sizes)[self.position] for sent, sizes in take()]
            assert [part.numel() for part in parts] == counts[0]
            torch.cat(parts, out=output)

        return _Later(finish)

    def all_gather(self, output: Tensor, source: Tensor) -> Pending:
        take = self._exchange("all-gather", source.clone())

        def finish() -> None:
            torch.cat(take(), out=output)

        return _Later(finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._exchange("objects", value)()


class SimulatedCommunicators:
    """The communicators of one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank = board, rank
        self._made: dict[tuple[int, ...], SimulatedCommunicator] = {}

    def over(self, ranks: tuple[int, ...]) -> SimulatedCommunicator:
        if ranks not in self._made:
            self._made[ranks] = SimulatedCommunicator(self._board, ranks, self.rank)
        return self._made[ranks]


def simulate(world: int, work: Callable[[SimulatedCommunicators], Any]) -> list[Any]:
    """Runs `work` on every rank; returns what each returned. Raises what the first failing one raised."""
    board, results = Board(), [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(SimulatedCommunicators(board, rank))
        except BaseException as error:
            board.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S * 2)
    if board.failure is not None:
        raise board.failure
    return results


# ---- shards ----------------------------------------------------------------------------------------------------------


def distribute(layout: Layout) -> Distribution:
    """The layout over ranks 0, 1, ..."""
    return Distribution(layout, tuple(range(layout.num_ranks)))


def shard_indices(layout: Layout, rank: int) -> list[Tensor]:
    """For each tensor dim, the indices that a rank holds."""
    coordinate = list(layout.coordinates())[rank]
    return [
        torch.cat([torch.arange(s.start, s.start + s.length) for s in segments] or [torch.arange(0)])
        for segments in (layout.local_segments(coordinate, dim) for dim in range(len(layout.global_shape)))
    ]


def shard_of(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """The local tensor of a rank, by plain indexing."""
    for dim, indices in enumerate(shard_indices(layout, rank)):
        full = full.index_select(dim, indices)
    return full.clone()


def assemble(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """The full tensor of the local ones; asserts that replicas hold the same bits."""
    full = torch.full(layout.global_shape, torch.nan, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        where = torch.meshgrid(*shard_indices(layout, rank), indexing="ij")
        before = full[where]
        assert bool((before.isnan() | (before == part)).all()), "two ranks hold different values of one element"
        full[where] = part
    assert not bool(full.isnan().any())
    return full


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What a simulated job ended with.

    Attributes:
        weights: The full tensors.
        momenta: Likewise, the momentum buffers.
        counters: Of the last step, by rank.
        plans: By rank.
    """

    weights: list[Tensor]
    momenta: list[Tensor]
    counters: list[MuonCounters]
    plans: list[ExchangePlan]


def train(
    layouts: Sequence[Layout],
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor | None]],
    *,
    splits: Sequence[Split | None] | None = None,
    has_gradient: Callable[[int, int], bool] = lambda rank, index: True,
    **options: Any,
) -> Trained:
    """Trains on all ranks of a mesh; asserts that replicas hold the same bits at the end.

    Args:
        layouts: Of each parameter, on one mesh.
        weights: Full initial values.
        gradients: For each step, the full reduced gradient of each parameter, or None.
        splits: Of each parameter.
        has_gradient: Whether a rank is given its part of a parameter's gradient.
        **options: Of `HyperMuon`.
    """

    def work(communicators: SimulatedCommunicators) -> tuple[list[Tensor], list[Tensor], MuonCounters, ExchangePlan]:
        rank = communicators.rank
        params = [nn.Parameter(shard_of(full, layout, rank)) for full, layout in zip(weights, layouts, strict=True)]
        optimizer = HyperMuon(
            params,
            distributions={param: distribute(layout) for param, layout in zip(params, layouts, strict=True)},
            splits={p: split for p, split in zip(params, splits or [None] * len(params), strict=True) if split},
            communicators=communicators,
            **options,
        )
        for of_step in gradients:
            for index, (param, full, layout) in enumerate(zip(params, of_step, layouts, strict=True)):
                given = full is not None and has_gradient(rank, index)
                param.grad = shard_of(full, layout, rank) if given else None
            optimizer.step()
        state = optimizer.state_dict()["state"]
        momenta = [state[index]["momentum_buffer"] for index in range(len(params))]
        return [param.detach() for param in params], momenta, optimizer.counters, optimizer.plan

    results = simulate(layouts[0].num_ranks, work)
    return Trained(
        [assemble([each[0][i] for each in results], layout) for i, layout in enumerate(layouts)],
        [assemble([each[1][i] for each in results], layout) for i, layout in enumerate(layouts)],
        [each[2] for each in results],
        [each[3] for each in results],
    )


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts equality bit by bit."""
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), (
            f"tensor {index} of shape {tuple(mine.shape)} differs by up to {float((mine - theirs).abs().max()):.3g}"
        )
