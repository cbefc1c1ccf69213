"""Which part of a matrix a rank holds, against plain indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.blocks import MatrixView
from hp_plugin.core.muon.distribution import Distribution, Piece, Run, pieces_of
from hp_plugin.core.muon.messages import read_runs, write_runs
from hp_plugin.core.muon.splits import Convolution, Interleaved, Stack, blocks_of
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.muon.layouts import Case, bounded, cases, flat, grid
from tests.muon.reference import indices_of
from tests.muon.simulation import distribute, shard_of


def layers(local: Tensor, view: MatrixView) -> Tensor:
    if view.kind == "stack":
        return local
    rows = local.shape[0]
    return local.reshape(1, rows, local[0].numel() if rows else 0)


@given(case=cases())
@bounded(80)
def test_pieces_are_what_indexing_finds(case: Case) -> None:
    for layout, split in zip(case.layouts, case.splits, strict=True):
        view, blocks = blocks_of("w", layout.global_shape, split)
        full = torch.arange(float(view.depth * view.rows * view.cols)).view(layout.global_shape)
        distribution = distribute(layout)
        for block in blocks:
            matrix = full.view(view.depth, view.rows, view.cols)[indices_of(block)]
            pieces = pieces_of(distribution, view, block)
            for replica in distribution.shards:
                found = torch.full(block.shape, torch.nan)
                for rank, piece in zip(replica, pieces, strict=True):
                    if piece is None:
                        continue
                    local = layers(shard_of(full, layout, rank), view)[piece.layer]
                    values = read_runs(local, piece.rows, piece.cols, local=True)
                    assert tuple(values.shape) == piece.shape
                    assert piece.numel == values.numel() > 0
                    before = read_runs(found, piece.rows, piece.cols, local=False)
                    assert bool(before.isnan().all()), "two shards hold one element"
                    write_runs(found, piece.rows, piece.cols, values, local=False)
                assert torch.equal(found, matrix)


@given(case=cases())
@bounded(40)
def test_replicas_partition_the_ranks_and_correspond(case: Case) -> None:
    for layout in case.layouts:
        distribution = distribute(layout)
        shards = distribution.shards
        assert sorted(rank for replica in shards for rank in replica) == list(range(layout.num_ranks))
        coordinates = list(layout.coordinates())
        for replica in shards:
            assert len(replica) == len(distribution.shard_coordinates)
            for rank, coordinate in zip(replica, distribution.shard_coordinates, strict=True):
                for dim in range(len(layout.global_shape)):
                    assert layout.local_segments(coordinates[rank], dim) == layout.local_segments(coordinate, dim)


def test_rows_that_touch_are_one_run() -> None:
    view, (block,) = blocks_of("w", (8, 3))
    assert pieces_of(distribute(flat((8, 3), 2)), view, block)[1] == Piece(0, (Run(0, 4, 4),), (Run(0, 0, 3),))
    assert pieces_of(None, view, block) == (Piece(0, (Run(0, 0, 8),), (Run(0, 0, 3),)),)


def test_interleaved_rows_are_runs_in_local_order() -> None:
    view, blocks = blocks_of("qkv", (12, 3), Interleaved(2, ("q", "k", "v"), (4, 1, 1)))
    q = pieces_of(distribute(flat((12, 3), 3)), view, blocks[0])
    assert [piece.rows if piece else None for piece in q] == [
        (Run(0, 0, 4),),
        (Run(2, 4, 2),),
        (Run(0, 6, 2),),
    ]
    k = pieces_of(distribute(flat((12, 3), 3)), view, blocks[1])
    assert [piece.rows if piece else None for piece in k] == [None, (Run(0, 0, 1),), (Run(2, 1, 1),)]


def test_strided_shards_have_several_runs() -> None:
    layout = Layout((8, 2), ("a", "b"), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    view, (block,) = blocks_of("w", (8, 2))
    rows = [piece.rows for piece in pieces_of(distribute(layout), view, block) if piece]
    assert [sum(run.length for run in each) for each in rows] == [2] * 4
    assert sorted(run.block for each in rows for run in each) == [0, 2, 4, 6]


def test_experts_and_empty_shards() -> None:
    view, blocks = blocks_of("experts", (3, 4, 2), Stack())
    pieces = [pieces_of(distribute(flat((3, 4, 2), 2)), view, block) for block in blocks]
    assert [[piece.layer if piece else None for piece in each] for each in pieces] == [[0, None], [1, None], [None, 0]]
    view, (block,) = blocks_of("w", (2, 5))
    assert [piece is None for piece in pieces_of(distribute(flat((2, 5), 4)), view, block)] == [
        False,
        False,
        True,
        True,
    ]


def test_convolutions_are_cut_by_output_and_input_channels_only() -> None:
    view, (block,) = blocks_of("conv", (4, 3, 2, 2), Convolution(1))
    piece = pieces_of(distribute(flat((4, 3, 2, 2), 2, Shard(1))), view, block)[1]
    assert piece is not None
    assert piece.cols == (Run(0, 8, 4),)
    with pytest.raises(UnsupportedError, match=r"\(4, 3, 2, 2\) is sharded along dim 3"):
        pieces_of(distribute(flat((4, 3, 2, 2), 2, Shard(3))), view, block)


def test_values_that_are_still_to_be_reduced_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Partial along .*Redistribute"):
        Distribution(Layout((4, 4), ("a",), (2,), (Partial(),)), (0, 1))


@pytest.mark.parametrize("ranks", [(0,), (0, 0), (0, 1, 2)])
def test_each_coordinate_needs_a_rank_of_its_own(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="needs as many different ranks"):
        Distribution(flat((4, 4), 2), ranks)


def test_ranks_of_any_numbers_and_order() -> None:
    distribution = Distribution(grid((4, 4), (2, 2, 1)), (7, 3, 5, 1))
    assert distribution.shards == ((7, 3), (5, 1))
    distribution.check_shard("w", 3, (2, 4))
    with pytest.raises(ConfigurationError, match=r"w of global shape .* has the local shape \(4, 4\) on rank 3"):
        distribution.check_shard("w", 3, (4, 4))
    with pytest.raises(ConfigurationError, match="of which rank 0 is none"):
        distribution.check_shard("w", 0, (2, 4))


def test_a_plain_tensor_has_a_distribution_only_with_a_group() -> None:
    assert Distribution.of(torch.ones(2, 2)) is None
    replicas = Layout((2, 2), ("replicas",), (3,), (Replicate(),))
    assert Distribution(replicas, (0, 1, 2)).shards == ((0,), (1,), (2,))
