"""What is gathered ahead, when and how much: one rank of four, on a process group that moves nothing.

Values do not matter here; `test_unit_behaviour` compares them under every budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plugin.core.fsdp import Phase
from hp_plugin.core.fsdp.prefetch import PassOrder
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.fsdp.unit import Unit
from tests.fsdp.twins import Model, assert_at_rest, shard_blocks

BLOCKS = 4
Seen = dict[str, list[list[int]]]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def sharded_model(**options: Any) -> Model:
    """Four equal blocks inside a root, sharded over four ranks."""
    model = Model()
    shard_blocks(model, init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_replicate", "dp_shard")), **options)
    return model


def unit(model: nn.Module) -> Unit:
    found = unit_of(model)
    assert found is not None
    return found


BLOCK_BYTES = 4 * (32 + 32 + 352 + 32 + 352)
"""Full parameters of a block: norm weight and bias, up weight and bias, down weight, at multiples of 32 elements."""


def watch(model: Model) -> Seen:
    """Records which blocks are gathered ahead while a block computes, as lists of block numbers."""
    seen: Seen = {"forward": [], "backward": []}
    blocks = dict.fromkeys(model.blocks)

    def ahead() -> list[int]:
        return [i for i, block in enumerate(blocks) if unit(block).phase is Phase.GATHERING]

    def note_forward(_module: nn.Module, _args: Any, output: Tensor) -> None:
        seen["forward"].append(ahead())
        if output.requires_grad:
            output.register_hook(lambda _: seen["backward"].append(ahead()))

    for block in blocks:
        block.up.register_forward_hook(note_forward)
    return seen


def step(model: nn.Module) -> None:
    model(torch.randn(2, 5)).square().mean().backward()
    assert_at_rest(model)


def steady(model: Model) -> Seen:
    """What `watch` records in a second step."""
    step(model)
    seen = watch(model)
    step(model)
    return seen


def test_the_pack_of_a_block_is_what_the_budget_counts() -> None:
    assert unit(sharded_model().blocks[0]).full_bytes == BLOCK_BYTES


@pytest.mark.parametrize(
    ("budget", "forward", "backward"),
    [
        (0, [[], [], [], []], [[], [], [], []]),
        (None, [[1], [2], [3], []], [[2], [1], [0], []]),
        (1, [[1], [2], [3], []], [[2], [1], [0], []]),
        (2 * BLOCK_BYTES - 1, [[1], [2], [3], []], [[2], [1], [0], []]),
        (2 * BLOCK_BYTES, [[1, 2], [2, 3], [3], []], [[1, 2], [0, 1], [0], []]),
        (1 << 40, [[1, 2, 3], [2, 3], [3], []], [[0, 1, 2], [0, 1], [0], []]),
    ],
)
def test_units_are_gathered_ahead_as_far_as_the_budget_goes(
    budget: int | None, forward: list[list[int]], backward: list[list[int]]
) -> None:
    assert steady(sharded_model(prefetch=budget)) == {"forward": forward, "backward": backward}


def test_the_first_step_prefetches_in_backward_only() -> None:
    model = sharded_model()
    seen = watch(model)
    step(model)
    assert seen == {"forward": [[], [], [], []], "backward": [[2], [1], [0], []]}


def test_the_default_is_the_largest_unit_inside_the_root() -> None:
    model = sharded_model()
    step(model)
    assert unit(model).root.prefetcher.budget == BLOCK_BYTES


def test_nothing_is_prefetched_where_nothing_travels() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    model = Model()
    shard_blocks(model, init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_replicate", "dp_shard")), prefetch=1 << 40)
    assert steady(model) == {"forward": [[]] * 4, "backward": [[]] * 4}


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "pairs"])
@pytest.mark.parametrize("budget", [None, 2 * BLOCK_BYTES, 1 << 40])
def test_a_recomputation_prefetches_no_finished_unit(kind: str, budget: int | None) -> None:
    """Every block is gathered once in forward and once in backward: Megatron-LM PR #6153, pytorch #105635."""
    model = sharded_model(prefetch=budget)
    model.checkpointing = kind
    step(model)
    counters = model.fsdp_counters()
    for _ in range(2):
        counters.reset()
        seen = watch(model)
        step(model)
        assert counters.all_gathers == 2 * BLOCKS + 1
        assert any(seen["backward"]), "nothing was prefetched in backward"


def test_evaluation_prefetches_nothing_and_leaves_the_order_alone() -> None:
    model = sharded_model()
    step(model)
    seen = watch(model)
    with torch.no_grad():
        model(torch.randn(2, 5))
        model.blocks[2](torch.randn(2, 13))
    assert seen["forward"] == [[]] * (BLOCKS + 1)
    assert_at_rest(model)
    seen["forward"].clear()
    step(model)
    assert seen["forward"] == [[1], [2], [3], []]


def test_a_pass_that_leaves_the_order_reshards_what_it_did_not_use_and_the_next_follows_it() -> None:
    model = sharded_model()
    step(model)
    seen = watch(model)
    skipped = model.blocks[1]
    model.blocks = nn.ModuleList([model.blocks[i] for i in (0, 2, 3)])
    step(model)
    assert seen["forward"] == [[1], [1], [1]], "block 1 takes the budget until the pass is over"
    assert_at_rest(skipped)
    seen["forward"].clear()
    step(model)
    assert seen["forward"] == [[2], [3], []]


def test_a_module_used_twice_is_gathered_ahead_twice() -> None:
    model = sharded_model()
    seen = watch(model)
    model.blocks = nn.ModuleList([model.blocks[i] for i in (0, 1, 2, 1, 3)])
    step(model)
    model.fsdp_counters().reset()
    seen["forward"].clear()
    step(model)
    assert seen["forward"] == [[1], [2], [1], [3], []]
    # Backward keeps block 1 from its last use to its first one, where its gradient is complete.
    assert model.fsdp_counters().all_gathers == 1 + 5 + 4


def test_lists_take_the_place_of_the_order() -> None:
    model = sharded_model()
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[3], blocks[1]])
    blocks[1].set_modules_to_forward_prefetch([])
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    seen = steady(model)
    assert seen["forward"] == [[1, 3], [3], [3], []]
    assert seen["backward"] == [[0, 1], [0, 1], [0], []]


def test_several_forwards_before_their_backwards_follow_the_same_order() -> None:
    model = sharded_model()
    step(model)
    seen = watch(model)
    for output in [model(torch.randn(2, 5)) for _ in range(3)]:
        output.sum().backward()
        assert_at_rest(model)
    assert seen["forward"] == [[1], [2], [3], []] * 3
    assert seen["backward"] == [[2], [1], [0], []] * 3


def test_an_output_that_the_loss_does_not_use_leaves_nothing_gathered() -> None:
    model = sharded_model(prefetch=1 << 40)
    step(model)
    handle = model.blocks[1].register_forward_hook(lambda _m, _args, output: output.detach())
    step(model)
    handle.remove()
    step(model)


def test_an_order_follows_repeats_and_gives_up_on_what_it_does_not_know() -> None:
    a, b, c = (object() for _ in range(3))
    order = PassOrder()
    order.begin(guess=[a, b])  # type: ignore[list-item]
    assert order.enter(a) == [b]  # type: ignore[arg-type]
    for _ in range(2):
        order.begin()
        for each in (a, a, b, a, c):
            order.enter(each)  # type: ignore[arg-type]
        order.end()
    assert order.recorded == [a, b, a, c], "entering a unit again at once is one entry"
    order.begin()
    assert order.enter(b) == [a, c]  # type: ignore[arg-type]
    assert order.enter(b) == [a, c]  # type: ignore[arg-type]
    assert order.enter(object()) == ()  # type: ignore[arg-type]
    assert order.enter(a) == [c]  # type: ignore[arg-type]
    assert order.enter(b) == (), "what is behind is not looked for again"
