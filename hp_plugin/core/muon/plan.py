"""Which rank orthogonalizes which matrix, and what travels for it.

The plan follows from layouts alone: every rank computes the same. Ranks that together hold replicas of the same
parameters form a *domain*: R replicas of F shards. A matrix of a domain has one owner among its F x R ranks. For each
wave of matrices there are at most two collectives:

* `out`, inside the owner's replica: the F shards bring their pieces to the owner.
* `back`, over the whole domain: the owner sends every rank its piece of the update.

Together each rank receives, of N matrices of S bytes, N S / F ((F-1)/(F R) + 1 - 1/(F R)) bytes: what a rank must
receive of every update that it does not compute itself, and of every matrix that it does. No plan that orthogonalizes
each matrix on one rank needs less. Where shards are whole matrices (experts sharded by expert, parameters on one rank),
an owner is chosen among those that hold the matrix, and there is no `out`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hp_plugin.core.muon.blocks import Block, MatrixView
from hp_plugin.core.muon.distribution import Distribution, Piece, pieces_of
from hp_plugin.core.muon.newton_schulz import NewtonSchulz
from hp_plugin.errors import ConfigurationError

Exchange = Literal["auto", "a2a", "gather", "gram"]
Mode = Literal["local", "a2a", "gather", "gram"]

_Kind = tuple[bool, Mode, NewtonSchulz]

DEFAULT_WAVE_BYTES = 32 << 20
"""Of the matrices that one rank owns in a wave."""

MAX_A2A_PEERS = 64
"""Ranks of one all-to-all. Beyond, it opens more connections than some networks have (HCCL reports failures to allocate
queue pairs at thousands): `auto` then gathers, and updates come back in two stages."""


@dataclass(frozen=True)
class MatrixParameter:
    """What the plan must know of a parameter.

    Attributes:
        name: For messages.
        view: How it is read.
        blocks: Its logical matrices.
        distribution: Where its shards are; None where this rank alone holds it.
        newton_schulz: How its blocks are orthogonalized. They travel in its dtype.
        exchange: How they travel.
        in_one_replica: Whether one replica owns all of its blocks, so that it alone needs the momentum.
        options: What else must be alike on all ranks, as text.
    """

    name: str
    view: MatrixView
    blocks: tuple[Block, ...]
    distribution: Distribution | None
    newton_schulz: NewtonSchulz
    exchange: Exchange = "auto"
    in_one_replica: bool = False
    options: str = ""

    def shards(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica."""
        return ((rank,),) if self.distribution is None else self.distribution.shards

    @property
    def digest(self) -> int:
        """Of all that must be alike on all ranks; the same in every process."""
        layout = None if self.distribution is None else (self.distribution.layout, self.distribution.ranks)
        said = (self.name, self.view, self.blocks, layout, self.newton_schulz, self.exchange, self.in_one_replica)
        return zlib.crc32(repr((*said, self.options)).encode())


@dataclass(frozen=True)
class PlannedBlock:
    """One matrix of the plan.

    Attributes:
        parameter: Index of its parameter.
        block: What it is of the parameter.
        pieces: What each shard holds of it.
        owner: The global rank that orthogonalizes it.
        replica: Index of the owner's replica.
        mode: How it travels.
        flops: Of its orthogonalization.
    """

    parameter: int
    block: Block
    pieces: tuple[Piece | None, ...]
    owner: int
    replica: int
    mode: Mode
    flops: int

    @functools.cached_property
    def holders(self) -> tuple[int, ...]:
        """Indices of the shards that hold a piece."""
        return tuple(index for index, piece in enumerate(self.pieces) if piece is not None)

    def message_numel(self, piece: Piece | None) -> int:
        """Elements that travel for a shard's piece, either way."""
        if piece is None:
            return 0
        return min(self.block.shape) ** 2 if self.mode == "gram" else piece.numel


@dataclass(frozen=True)
class Wave:
    """Matrices of a domain that travel together.

    Attributes:
        shards: The ranks of each replica of the domain.
        blocks: The matrices, in the order in which they lie in messages.
        mode: Of all of them.
        newton_schulz: Of all of them.
        goes_out: Whether any owner needs pieces of other ranks.
        comes_back: Whether any other rank needs the update.
    """

    shards: tuple[tuple[int, ...], ...]
    blocks: tuple[PlannedBlock, ...]
    mode: Mode
    newton_schulz: NewtonSchulz
    goes_out: bool
    comes_back: bool

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the domain, ascending."""
        return tuple(sorted(rank for replica in self.shards for rank in replica))

    @property
    def has_two_stages(self) -> bool:
        """Whether updates come back inside the owner's replica first and then between the ranks that hold a shard."""
        both = len(self.shards) > 1 and len(self.shards[0]) > 1
        return self.comes_back and both and self.mode != "gather" and len(self.ranks) > MAX_A2A_PEERS

    @functools.cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """(replica, shard) of each rank."""
        return {rank: (r, f) for r, replica in enumerate(self.shards) for f, rank in enumerate(replica)}


@dataclass(frozen=True)
class ExchangePlan:
    """The waves of all domains of one rank, in the order in which they run.

    Attributes:
        parameters: The parameters.
        waves: The waves.
        loads: FLOPs of orthogonalization of each rank of these domains.
    """

    parameters: tuple[MatrixParameter, ...]
    waves: tuple[Wave, ...]
    loads: Mapping[int, int]

    def received_elements(self, rank: int) -> tuple[int, int]:
        """Elements of matrices that `rank` receives in a step: `out` and `back`. Messages of mode gather hold more."""
        out = back = 0
        for wave in self.waves:
            replica, shard = wave.places.get(rank, (-1, -1))
            for block in wave.blocks if replica >= 0 else ():
                sizes = [block.message_numel(piece) for piece in block.pieces]
                if block.owner == rank:
                    out += sum(sizes) - sizes[shard]
                else:
                    back += sizes[shard]
        return out, back

    @property
    def flops_imbalance(self) -> float:
        """The largest load over the mean: 1.0 is even."""
        total = sum(self.loads.values())
        return max(self.loads.values()) * len(self.loads) / total if total else 1.0

    def table(self) -> str:
        """The plan as text: one line for each wave."""
        lines = [f"{'wave':>4} {'mode':>6} {'ranks':>5} {'matrices':>8} {'GFLOP':>9} {'elements out':>12} {'back':>12}"]
        for number, wave in enumerate(self.waves):
            flops = sum(block.flops for block in wave.blocks)
            one = dataclasses.replace(self, waves=(wave,))
            moved = [one.received_elements(rank) for rank in wave.ranks]
            out, back = (sum(each) for each in zip(*moved, strict=True))
            lines.append(
                f"{number:>4} {wave.mode:>6} {len(wave.ranks):>5} {len(wave.blocks):>8} {flops / 1e9:>9.3f} "
                f"{out:>12} {back:>12}"
            )
        lines.append(f"load of the busiest rank over the mean: {self.flops_imbalance:.3f}")
        return "\n".join(lines)


def make_plan(
    parameters: Sequence[MatrixParameter],
    rank: int,
    *,
    loads_of: Callable[[tuple[int, ...], int], Mapping[int, int]] | None = None,
    wave_bytes: int = DEFAULT_WAVE_BYTES,
) -> ExchangePlan:
    """The plan of `rank`.

    Domains are planned from the smallest to the largest, so that what a rank owns of a small one (its experts) counts
    when matrices of a large one are distributed.

    Args:
        parameters: The parameters, in the same order on all ranks that share them.
        rank: The global rank.
        loads_of: For the ranks of a domain and the load of this rank so far, the loads so far of all of them: a
            collective over those ranks. None: this rank's view is taken: right where all have the same domains.
        wave_bytes: Bytes of matrices that one rank owns in a wave.
    """
    domains: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        domains.setdefault(parameter.shards(rank), []).append(index)
    loads: dict[int, int] = {rank: 0}
    waves: list[Wave] = []
    # An order of all domains of the job, whatever the order of parameters here, so that ranks cannot wait in a circle.
    for shards in sorted(domains, key=lambda each: (sum(map(len, each)), each)):
        ranks = tuple(sorted(r for replica in shards for r in replica))
        if loads_of is not None and len(ranks) > 1:
            loads.update(loads_of(ranks, loads[rank]))
        blocks = [block for index in domains[shards] for block in _unowned_blocks(index, parameters[index], shards)]
        bound = {index for index in domains[shards] if parameters[index].in_one_replica}
        waves += _waves(assign_owners(blocks, shards, loads, bound=bound), shards, parameters, wave_bytes)
    return ExchangePlan(tuple(parameters), tuple(waves), loads)


def _unowned_blocks(
    index: int, parameter: MatrixParameter, shards: tuple[tuple[int, ...], ...]
) -> Iterable[PlannedBlock]:
    newton_schulz = parameter.newton_schulz
    for block in parameter.blocks:
        pieces = pieces_of(parameter.distribution, parameter.view, block)
        planned = PlannedBlock(index, block, pieces, -1, -1, mode="a2a", flops=newton_schulz.flops(*block.shape))
        mode = parameter.exchange
        if mode == "gram" and len(planned.holders) > 1 and not _fits_gram(planned, parameter):
            raise ConfigurationError(
                f'exchange="gram" does not fit parameter {parameter.name}: it needs shards along the longer dim of a '
                "matrix alone, at most 5 steps, neither exact=True nor momentum on one replica, and float32 products "
                'that are float32; use "auto"'
            )
        if mode == "auto":
            mode = "a2a" if max(len(shards[0]), len(shards)) <= MAX_A2A_PEERS else "gather"
            if _fits_gram(planned, parameter) and _gram_is_cheaper(planned, parameter, len(shards)):
                mode = "gram"
        if mode == "gram" and len(planned.holders) > 1:
            planned = dataclasses.replace(planned, flops=newton_schulz.gram_flops(*block.shape))
        elif mode == "gram":
            mode = "a2a"  # one shard has all of it
        yield dataclasses.replace(planned, mode=mode)


def _fits_gram(block: PlannedBlock, parameter: MatrixParameter) -> bool:
    """Whether each shard holds all of the short dim of a block, and the Gram form may be used."""
    if len(block.holders) < 2 or parameter.in_one_replica or not parameter.newton_schulz.allows_gram_exchange:
        return False
    rows, cols = block.block.shape
    dim = 0 if rows <= cols else 1
    return all(piece.shape[dim] == min(rows, cols) for piece in block.pieces if piece is not None)


def _gram_is_cheaper(block: PlannedBlock, parameter: MatrixParameter, num_replicas: int) -> bool:
    """Whether fewer bytes travel, over all ranks, if Gram matrices do instead of pieces."""
    num_shards = len(block.holders)
    rank_pairs = num_shards - 1 + num_shards * num_replicas - 1
    gram_bytes = rank_pairs * min(block.block.shape) ** 2 * torch.float32.itemsize
    whole_bytes = math.prod(block.block.shape) * parameter.newton_schulz.dtype.itemsize
    return gram_bytes < whole_bytes * (num_replicas + 1 - 2 / num_shards)


def assign_owners(
    blocks: Sequence[PlannedBlock],
    shards: tuple[tuple[int, ...], ...],
    loads: dict[int, int],
    *,
    bound: Collection[int] = (),
) -> list[PlannedBlock]:
    """Gives each matrix to the least loaded rank that may own it, the longest first. Same everywhere.

    A matrix that some shard holds whole stays on such a shard, and these are given first: of the others any rank of the
    domain may be the owner, so they even out what those have left uneven.

    Args:
        blocks: Matrices of one domain.
        shards: The ranks of each replica.
        loads: FLOPs of each rank so far; updated.
        bound: Parameters whose matrices must be owned by ranks of one replica.

    Returns:
        The matrices with owner, replica and mode, in the order of `blocks`.
    """
    everyone = [(replica, each) for replica, ranks in enumerate(shards) for each in ranks]
    for _, each in everyone:
        loads.setdefault(each, 0)
    owned: dict[int, PlannedBlock] = {}
    replica_of: dict[int, int] = {}
    for index in sorted(range(len(blocks)), key=lambda i: (len(blocks[i].holders) > 1, -blocks[i].flops, i)):
        block = blocks[index]
        candidates = everyone
        if len(block.holders) == 1:
            candidates = [(replica, ranks[block.holders[0]]) for replica, ranks in enumerate(shards)]
        if block.parameter in bound and block.parameter in replica_of:
            candidates = [each for each in candidates if each[0] == replica_of[block.parameter]]
        replica, owner = min(candidates, key=lambda each: (loads[each[1]], each[1]))
        replica_of.setdefault(block.parameter, replica)
        loads[owner] += block.flops
        mode: Mode = "local" if len(block.holders) == 1 and len(shards) == 1 else block.mode
        owned[index] = dataclasses.replace(block, owner=owner, replica=replica, mode=mode)
    return [owned[index] for index in range(len(blocks))]


def _waves(
    blocks: Sequence[PlannedBlock],
    shards: tuple[tuple[int, ...], ...],
    parameters: Sequence[MatrixParameter],
    wave_bytes: int,
) -> list[Wave]:
    """Cuts the matrices into waves in which no rank owns more than about `wave_bytes`, alike matrices together."""
    filled: dict[tuple[_Kind, int], int] = {}
    waves: dict[tuple[_Kind, int], list[PlannedBlock]] = {}
    # Large ones first, as they were distributed: every wave then has work for every rank.
    for block in sorted(blocks, key=lambda b: (-b.flops, b.block.shape)):
        newton_schulz = parameters[block.parameter].newton_schulz
        if block.mode == "gram":
            newton_schulz = dataclasses.replace(newton_schulz, dtype=torch.float32, kernel="gram")
        kind = (len(block.holders) > 1, block.mode, newton_schulz)
        before = filled.get((kind, block.owner), 0)
        filled[kind, block.owner] = before + math.prod(block.block.shape) * newton_schulz.dtype.itemsize
        waves.setdefault((kind, before // wave_bytes), []).append(block)
    made = [
        Wave(shards, tuple(members), mode, newton_schulz, goes_out, goes_out or len(shards) > 1)
        for ((goes_out, mode, newton_schulz), _), members in waves.items()
    ]
    # What travels comes first: matrices that stay are orthogonalized while the last of them is on its way back.
    return sorted(made, key=lambda wave: (not wave.goes_out, not wave.comes_back))
