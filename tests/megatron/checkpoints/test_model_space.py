"""Rows read from the flattened blocks of `fully_sharded_model_space`; no process group is needed."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints import model_space
from hp_plugin.megatron.checkpoints.gathered_space import _starts
from hp_plugin.megatron.checkpoints.slices import stand_in
from hp_plugin.megatron.releases.differences import takes_irregular_grids
from tests.megatron.checkpoints.older_release import flattened
from tests.megatron.checkpoints.test_slices import held_by_each, layer_template, rows_of, swiglu_template

KEY = "optimizer.state.exp_avg.weight"
newer = pytest.mark.skipif(not takes_irregular_grids(), reason="Megatron 0.12 reads flattened ranges by itself")


def opened(**tensors: tuple[torch.Tensor, tuple[int, ...] | None]) -> Any:
    """A checkpoint with these tensors, stored and global shape."""
    metadata = SimpleNamespace(
        state_dict_metadata={key: SimpleNamespace(size=stored.shape) for key, (stored, _) in tensors.items()},
        mcore_data={
            key: {"nd_reformulated_orig_global_shape": shape}
            for key, (_, shape) in tensors.items()
            if shape is not None
        },
    )
    return SimpleNamespace(directory=Path("saved"), tensors=metadata)


def read(stored: torch.Tensor, entry: Any, *, in_place: bool) -> torch.Tensor:
    """What loading does: pieces are filled with what is in their place, and merged."""
    if isinstance(entry, LocalNonpersistentObject):
        return entry.unwrap()
    loaded = []
    for piece in entry.build():
        assert tuple(stored.shape) == piece.global_shape
        place = tuple(slice(o, o + s) for o, s in zip(piece.global_offset, piece.local_shape))
        data = piece.data if in_place else torch.empty_like(piece.data)
        loaded.append(data.copy_(stored[place]))
    return entry.merge_fn(loaded)


def entry_of(stored: torch.Tensor, shape: tuple[int, ...], template: Any, held: Any, local: torch.Tensor) -> Any:
    key = f"optimizer.state.exp_avg.{template.key}"
    return model_space.entry(opened(**{key: (stored, shape)}), template, held, local, name="exp_avg", chain="")


@newer
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 2),
    saved=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2])),
    here=st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 1)),
    shards=st.integers(1, 5),
    in_place=st.booleans(),
)
def test_rows_are_read_from_blocks_of_any_other_grid(rows, columns, saved, here, shards, in_place):
    layers, (tp, axis) = 2, here
    shape = (layers, 6 * rows, 6 * columns)
    image = torch.randn(shape)
    stored = flattened(image, (layers, *saved))
    for layer, tp_rank in itertools.product(range(layers), range(tp)):
        full = image[layer].chunk(tp, axis)[tp_rank]
        template = layer_template(
            stand_in(full, torch.float32), layer=layer, layers=layers, tp_rank=tp_rank, tp=tp, axis=axis
        )
        for held in held_by_each(tuple(full.shape), 1, shards):
            local = torch.full(held.local_shape, float("nan"))
            entry = entry_of(stored, shape, template, held, local)
            assert isinstance(entry, LocalNonpersistentObject) != bool(held.segments)
            assert torch.equal(read(stored, entry, in_place=in_place).view(held.local_shape), rows_of(full, held))


@newer
@pytest.mark.parametrize(("saved", "here"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_swiglu_halves_are_read_from_where_stock_put_them(saved: int, here: int, shards: int) -> None:
    image = torch.randn(3, 8, 4)  # two halves of 4 rows
    stored = flattened(image, (3, 2 * saved, 1))
    for tp_rank in range(here):
        gate, up = (half.chunk(here)[tp_rank] for half in image[1].chunk(2))  # the layer of the template
        full = torch.cat([gate, up])
        template = swiglu_template(stand_in(full, torch.float32), tp_rank=tp_rank, tp=here, layered=True)
        for held in held_by_each(tuple(full.shape), 1, shards):
            local = torch.zeros(held.local_shape)
            entry = entry_of(stored, (3, 8, 4), template, held, local)
            assert torch.equal(read(stored, entry, in_place=True), rows_of(full, held))


@newer
def test_whole_rows_of_one_block_are_read_into_place() -> None:
    image = torch.randn(1, 4, 3)
    template = layer_template(stand_in(image[0], torch.float32), layer=0, layers=1, tp_rank=0, tp=1, axis=0)
    held = list(held_by_each((4, 3), 1, 2))[1]
    local = torch.zeros(2, 3)
    (piece,) = entry_of(flattened(image, (1, 1, 1)), (1, 4, 3), template, held, local).build()
    assert piece.data.data_ptr() == local.data_ptr()
    assert piece.global_offset == (0, 0, 0, 6)


@newer
def test_rows_of_a_vocabulary_that_is_padded_further_are_zero() -> None:
    image = torch.randn(1, 6, 2)
    full = torch.cat([image[0], torch.zeros(2, 2)])
    template = layer_template(stand_in(full, torch.float32), layer=0, layers=1, tp_rank=0, tp=1, axis=0)
    template.allow_shape_mismatch = True
    for held in held_by_each((8, 2), 1, 4):
        local = torch.full(held.local_shape, float("nan"))
        entry = entry_of(flattened(image, (1, 2, 1)), (1, 6, 2), template, held, local)
        found = read(flattened(image, (1, 2, 1)), entry, in_place=False)
        assert torch.equal(found, rows_of(full, held))


@newer
def test_a_tensor_of_another_model_is_refused() -> None:
    image = torch.randn(1, 6, 2)
    template = layer_template(stand_in(torch.empty(8, 2), torch.float32), layer=0, layers=1, tp_rank=0, tp=1, axis=0)
    held = next(held_by_each((8, 2), 1, 1))
    with pytest.raises(UnsupportedError, match=r"has the shape \(1, 6, 2\) in the checkpoint and \(1, 8, 2\)"):
        entry_of(flattened(image, (1, 1, 1)), (1, 6, 2), template, held, torch.empty(8, 2))


class TestNames:
    """Under expert parallelism Megatron puts the number of the optimizer before the keys."""

    def test_a_job_with_one_optimizer_finds_the_state_under_any_number(self) -> None:
        saved = opened(**{f"chained_1.{KEY}": (torch.empty(1, 2), (2,))})
        assert model_space._key(saved, KEY, "") == f"chained_1.{KEY}"

    def test_a_job_with_several_asks_for_its_own_number(self) -> None:
        saved = opened(**{f"chained_{i}.{KEY}": (torch.empty(1, 2), (2,)) for i in range(2)})
        assert model_space._key(saved, KEY, "chained_1.") == f"chained_1.{KEY}"

    def test_a_state_that_stands_under_no_number_is_refused_to_a_job_with_several(self) -> None:
        with pytest.raises(UnsupportedError, match="expert-model-parallel-size 1"):
            model_space._key(opened(**{KEY: (torch.empty(1, 2), (2,))}), KEY, "chained_0.")

    def test_a_missing_state_is_refused_by_name(self) -> None:
        with pytest.raises(UnsupportedError, match=r"has no optimizer\.state\.exp_avg\.weight.*--no-load-optim"):
            model_space._key(opened(), KEY, "")


@newer
def test_a_tensor_that_is_not_flattened_is_refused() -> None:
    saved = opened(**{KEY: (torch.empty(2, 2), None)})
    with pytest.raises(UnsupportedError, match="not that of a flattened tensor"):
        model_space._Blocks.of(saved, KEY)


def parameter(elements: int, *, shared: bool = False) -> torch.Tensor:
    tensor = torch.empty(elements, device="meta")
    tensor.shared_embedding = shared
    return tensor


class TestPlacesInAGatheredBuffer:
    """By hand, from the rules of Megatron 0.12: multiples of 64, padding behind buckets left out."""

    def test_parameters_come_in_reverse_order_at_multiples_of_64(self) -> None:
        assert _starts([parameter(10), parameter(100)], None, 2, 128) == ([128, 0], 138)

    def test_the_padding_behind_a_full_bucket_is_left_out(self) -> None:
        # 100 elements fill the first bucket, which ends at 128; without the padding the next begins at 100.
        assert _starts([parameter(10), parameter(100)], 90, 2, 128) == ([100, 0], 110)

    def test_a_shared_embedding_has_a_bucket_of_its_own(self) -> None:
        # It begins at 128, a multiple of 64 and of the number of ranks, and what comes next begins anew.
        sizes = [parameter(5), parameter(70, shared=True), parameter(100)]
        assert _starts(sizes, None, 2, 128) == ([198, 128, 0], 203)

    def test_a_bucket_before_a_shared_embedding_ends_at_a_multiple_of_the_ranks(self) -> None:
        # 64 is not one of 3 ranks: the bucket ends at 384 = lcm(3, 128), and this padding is saved.
        assert _starts([parameter(70, shared=True), parameter(60)], None, 3, 384) == ([384, 0], 454)
