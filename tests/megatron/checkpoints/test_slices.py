"""Cutting Megatron's descriptions of whole tensors into the rows of each rank; no process group is needed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from hp_plugin.core.layout import Layout, local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.slices import HeldRows, assemble, cut, stand_in, whole_template
from hp_plugin.megatron.releases.differences import takes_irregular_grids


class Group:
    """Stands for one rank of a process group; Megatron's factory asks it for rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def held_by_each(shape: tuple[int, ...], replicas: int, shards: int) -> Iterator[HeldRows]:
    layout = Layout(shape, ("dp_replicate", "dp_shard"), (replicas, shards), (Replicate(), Shard(0)))
    for coordinate in layout.coordinates():
        yield HeldRows.from_layout(layout, coordinate)


def rows_of(full: torch.Tensor, held: HeldRows) -> torch.Tensor:
    rows = [full.narrow(0, segment.start, segment.length) for segment in held.segments]
    return torch.cat(rows) if rows else full[:0]


def sharded_tensors(entry: Any) -> list[ShardedTensor]:
    if isinstance(entry, LocalNonpersistentObject):
        return []
    built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    return list(nested_values(built))


def write(image: torch.Tensor, times: torch.Tensor, entry: Any) -> None:
    """What saving does: the main replica of each piece goes to its place in the global tensor."""
    for piece in sharded_tensors(entry):
        assert tuple(image.shape) == piece.global_shape
        if takes_irregular_grids():
            assert not piece.has_regular_grid
        else:
            assert [n * size for n, size in zip(piece.axis_fragmentations, piece.local_shape)] == [*piece.global_shape]
            assert all(at % size == 0 for at, size in zip(piece.global_offset, piece.local_shape))
        if is_main_replica(piece.replica_id):
            image[piece.global_slice()] = piece.data
            times[piece.global_slice()] += 1


def read(image: torch.Tensor, entry: Any) -> torch.Tensor:
    """What loading does: every piece is read, and a factory merges its pieces."""
    if isinstance(entry, LocalNonpersistentObject):
        return entry.unwrap()
    loaded = [image[piece.global_slice()].clone() for piece in sharded_tensors(entry)]
    return entry.merge_fn(loaded) if isinstance(entry, ShardedTensorFactory) else loaded[0]


def layer_template(
    standing: torch.Tensor, *, layer: int, layers: int, tp_rank: int, tp: int, axis: int
) -> ShardedTensor:
    """As Megatron describes a layer's weight: layers stacked in front, tensor-parallel along `axis`."""
    offsets = [(0, layer, layers), (axis + 1, tp_rank, tp)]
    return ShardedTensor.from_rank_offsets(
        "layers.weight", standing, *offsets, replica_id=(0, 0, 5), prepend_axis_num=1
    )


def swiglu_template(standing: torch.Tensor, *, tp_rank: int, tp: int, layered: bool) -> ShardedTensorFactory:
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    front = ((0, 1, 3),) if layered else ()
    whole = ShardedTensor.from_rank_offsets(
        "fc1.weight", standing, *front, (len(front), tp_rank, tp), replica_id=(0, 0, 5), prepend_axis_num=len(front)
    )
    groups = {"tp_group": Group(tp_rank, tp), "dp_group": Group(0, 1)}  # which releases before 0.19 do not take
    taken = inspect.signature(apply_swiglu_sharded_factory).parameters
    return apply_swiglu_sharded_factory(whole, front, **{name: groups[name] for name in groups if name in taken})


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    replicas=st.integers(1, 2),
    shards=st.integers(1, 5),
    tp=st.integers(1, 2),
    axis=st.integers(0, 1),
)
def test_pieces_of_all_ranks_fill_the_global_tensor_exactly_once(rows, replicas, shards, tp, axis):
    layers, columns = 3, 4
    shape = [layers, rows, columns]
    shape[axis + 1] *= tp
    image, times = torch.zeros(shape), torch.zeros(shape)
    for layer, tp_rank in itertools.product(range(layers), range(tp)):
        full = torch.randn(rows, columns)
        template = layer_template(
            stand_in(full, torch.float32), layer=layer, layers=layers, tp_rank=tp_rank, tp=tp, axis=axis
        )
        entries = [
            (held, cut(template, held, rows_of(full, held))) for held in held_by_each((rows, columns), replicas, shards)
        ]
        for _, entry in entries:
            write(image, times, entry)
        for held, entry in entries:
            assert torch.equal(assemble(read(image, entry), held.local_shape), rows_of(full, held))
    assert torch.all(times == 1)


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(1, 7),
    replicas=st.integers(1, 2),
    shards=st.integers(1, 6),
    tp=st.integers(1, 2),
    layered=st.booleans(),
)
def test_swiglu_halves_are_saved_where_stock_saves_them(half, replicas, shards, tp, layered):
    """Shards that lie in one half, span both, or are empty; the oracle is the unmodified factory on the full tensor."""
    shape = ([3] if layered else []) + [2 * half * tp, 4]
    expected, image, times = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for tp_rank in range(tp):
        full = torch.randn(2 * half, 4)
        stock = swiglu_template(full, tp_rank=tp_rank, tp=tp, layered=layered)
        for piece in stock.build():
            expected[piece.global_slice()] = piece.data
        template = swiglu_template(stand_in(full, torch.float32), tp_rank=tp_rank, tp=tp, layered=layered)
        entries = [
            (held, cut(template, held, rows_of(full, held))) for held in held_by_each((2 * half, 4), replicas, shards)
        ]
        for _, entry in entries:
            write(image, times, entry)
        for held, entry in entries:
            assert torch.equal(assemble(read(image, entry), held.local_shape), rows_of(full, held))
    assert torch.equal(image, expected)
    assert times.max() == 1
    assert times.sum() == times.numel() // (3 if layered else 1)


def test_optimizer_states_follow_their_parameter_under_a_prefixed_key_in_their_own_dtype():
    held = next(itertools.islice(held_by_each((6, 2), 1, 2), 1, None))
    template = swiglu_template(stand_in(torch.empty(6, 2), torch.bfloat16), tp_rank=0, tp=1, layered=False)
    local = torch.randn(3, 2)
    entry = cut(template, held, local, prefix="optimizer.state.exp_avg")
    assert {piece.key for piece in sharded_tensors(entry)} == {"optimizer.state.exp_avg.fc1.weight"}
    assert all(piece.dtype == torch.float32 for piece in sharded_tensors(entry))


def test_loading_writes_into_the_shard_itself():
    held = next(held_by_each((4, 3), 1, 2))
    template = layer_template(stand_in(torch.empty(4, 3), torch.float32), layer=0, layers=2, tp_rank=0, tp=1, axis=0)
    local = torch.zeros(2, 3)
    cut(template, held, local).data.fill_(7.0)
    assert torch.all(local == 7.0)


def test_an_empty_shard_is_neither_written_nor_read():
    last = list(held_by_each((2, 3), 1, 4))[-1]
    template = layer_template(stand_in(torch.empty(2, 3), torch.float32), layer=0, layers=2, tp_rank=0, tp=1, axis=0)
    entry = cut(template, last, torch.empty(0, 3))
    assert last.local_shape == (0, 3)
    assert isinstance(entry, LocalNonpersistentObject)


def test_only_replica_zero_writes_and_further_copies_of_stock_stay_further_copies():
    def ids(stock: Any) -> list[Any]:
        standing = stand_in(torch.empty(4, 3), torch.float32)
        template = ShardedTensor.from_rank_offsets("norm", standing, replica_id=stock)
        return [cut(template, held, torch.empty(held.local_shape)).replica_id for held in held_by_each((4, 3), 2, 2)]

    assert ids((0, 0, 3)) == [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1)]
    assert ids((0, 1, 3)) == [(0, 1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1)]
    with pytest.raises(UnsupportedError, match="replica id 3"):
        ids(3)


def test_padding_permission_of_the_vocabulary_is_kept():
    held = next(held_by_each((4, 3), 1, 2))
    template = ShardedTensor.from_rank_offsets(
        "embedding", stand_in(torch.empty(4, 3), torch.float32), replica_id=(0, 0, 0), allow_shape_mismatch=True
    )
    assert cut(template, held, torch.empty(2, 3)).allow_shape_mismatch


def test_a_factory_that_transforms_the_parameter_is_refused_by_name():
    def transposed(key, tensor, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, tensor.t(), replica_id=replica_id)]

    standing = stand_in(torch.empty(4, 3), torch.float32)
    template = ShardedTensorFactory("odd.weight", standing, transposed, lambda loaded: loaded[0].t(), (0, 0, 0))
    with pytest.raises(UnsupportedError, match=r"odd\.weight is transformed"):
        cut(template, next(held_by_each((4, 3), 1, 2)), torch.empty(2, 3))


def test_columns_cut_by_a_factory_are_refused():
    def columns(key, tensor, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(key, part, (1, i, 2), replica_id=replica_id)
            for i, part in enumerate(tensor.chunk(2, dim=1))
        ]

    standing = stand_in(torch.empty(4, 6), torch.float32)
    template = ShardedTensorFactory("odd.weight", standing, columns, torch.cat, (0, 0, 0))
    with pytest.raises(UnsupportedError, match="only runs of whole rows"):
        cut(template, next(held_by_each((4, 6), 1, 2)), torch.empty(2, 6))


@pytest.mark.parametrize("placements", [(Replicate(), Shard(1)), (Partial(), Shard(0))])
def test_layouts_that_are_not_rows_are_refused(placements):
    layout = Layout((4, 4), ("dp_replicate", "dp_shard"), (1, 2), placements)
    with pytest.raises(UnsupportedError, match="only parameters sharded along dim 0"):
        HeldRows.from_layout(layout, (0, 0))


def test_a_local_tensor_of_another_shape_than_its_layout_is_an_error():
    template = layer_template(stand_in(torch.empty(4, 3), torch.float32), layer=0, layers=2, tp_rank=0, tp=1, axis=0)
    with pytest.raises(ValueError, match="its layout says"):
        cut(template, next(held_by_each((4, 3), 1, 2)), torch.empty(3, 3))


def test_a_stand_in_has_shape_and_marks_of_its_parameter_and_no_memory():
    parameter = torch.nn.Parameter(torch.randn(8, 4))
    parameter.tensor_model_parallel, parameter.main_grad = True, torch.zeros(8, 4)
    standing = stand_in(parameter, torch.bfloat16)
    assert standing.is_meta
    assert standing.shape == (8, 4)
    assert standing.dtype == torch.bfloat16
    assert standing.tensor_model_parallel
    assert not hasattr(standing, "main_grad")
    assert local_tensor(standing) is standing


def test_a_part_of_a_parameter_is_told_from_the_whole():
    standing = stand_in(torch.empty(4, 3), torch.float32)
    held = next(held_by_each((4, 3), 1, 2))
    whole = ShardedTensor.from_rank_offsets("w", standing, replica_id=(0, 0, 0))
    part = ShardedTensor.from_rank_offsets("w", standing[:2], replica_id=(0, 0, 0))
    assert whole_template(whole, held)
    assert not whole_template(part, held)


def test_assemble_refuses_another_number_of_elements():
    with pytest.raises(ValueError, match="was expected"):
        assemble(torch.empty(1, 2, 3), (3, 3))
