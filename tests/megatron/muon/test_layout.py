"""Where the parts of a weight are under tensor and data parallelism, against tensors that are cut as Megatron cuts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hp_plugin.megatron.muon.layout import RankGrid, TensorParallelCut, distribution_of


def marked(dim: int, stride: int = 1) -> torch.Tensor:
    parameter = torch.empty(0)
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
    return parameter


def cut_by_megatron(whole: torch.Tensor, dim: int, size: int, stride: int) -> list[torch.Tensor]:
    """`_initialize_affine_weight_cpu`: size * stride pieces, of which rank i takes each size-th from the i-th."""
    pieces = torch.chunk(whole, size * stride, dim)
    return [torch.cat(pieces[rank::size], dim) for rank in range(size)]


@pytest.mark.parametrize(("dim", "stride"), [(0, 1), (0, 2), (1, 1), (1, 3)])
@pytest.mark.parametrize(("tp", "replicas", "shards"), [(2, 1, 1), (2, 2, 2), (4, 1, 3), (3, 2, 5), (1, 2, 2)])
def test_every_rank_holds_what_megatron_and_hyperfsdp_leave_it(
    dim: int, stride: int, tp: int, replicas: int, shards: int
) -> None:
    whole = torch.arange(24 * 36).reshape(24, 36)
    parts = cut_by_megatron(whole, dim, tp, stride)
    meshes = torch.arange(tp * replicas * shards).reshape(replicas, shards, tp)  # tensor-parallel ranks are neighbours
    grid = RankGrid(
        tuple(tuple(meshes[:, :, rank].flatten().tolist()) for rank in range(tp)),
        ("dp_replicate", "dp_shard"),
        (replicas, shards),
    )
    cut = TensorParallelCut.of(marked(dim, stride), tp)
    found = distribution_of(parts[0].shape, (Replicate(), Shard(0)), cut, grid)
    layout = found.layout
    assert layout.global_shape == (24, 36)
    for rank, coordinate in zip(found.ranks, layout.coordinates(), strict=True):
        replica, shard, part = coordinate
        assert rank == int(meshes[replica, shard, part])
        rows = torch.chunk(parts[part], shards, 0)
        expected = rows[shard] if shard < len(rows) else parts[part][:0]
        indices = [
            [
                index
                for start, length in layout.local_segments(coordinate, axis)
                for index in range(start, start + length)
            ]
            for axis in range(2)
        ]
        assert torch.equal(whole[indices[0]][:, indices[1]], expected)
        found.check_shard("weight", rank, expected.shape)


def test_what_tensor_parallelism_does_not_cut_has_copies_there() -> None:
    grid = RankGrid(((0, 2), (1, 3)), ("dp",), (2,))
    for parameter in (torch.empty(0), marked(-1)):
        cut = TensorParallelCut.of(parameter, 2)
        found = distribution_of((6, 4), (Replicate(),), cut, grid)
        assert found.layout.global_shape == (6, 4)
        assert sorted(itertools.chain(*found.shards)) == [0, 1, 2, 3]
        assert len(found.shards) == 4


def test_a_part_that_is_a_matrix_by_itself_is_on_its_own_ranks() -> None:
    grid = RankGrid(((0, 2), (1, 3)), ("dp",), (2,))
    found = distribution_of((6, 4), (Shard(0),), TensorParallelCut.of(marked(0), 2), grid, own=1)
    assert found.ranks == (1, 3)
    assert found.layout.global_shape == (6, 4)


def test_gate_and_up_are_cut_each_by_itself_whatever_the_mark_says() -> None:
    cut = TensorParallelCut.of(marked(0), 2, pieces=2)
    found = distribution_of((4, 3), (Replicate(),), cut, RankGrid(((0,), (1,)), ("dp",), (1,)))
    rows = [[tuple(each) for each in found.layout.local_segments((0, part), 0)] for part in range(2)]
    assert rows == [[(0, 2), (4, 2)], [(2, 2), (6, 2)]]
