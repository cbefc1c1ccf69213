"""Rank functions of `test_unit_behaviour`: every one builds a plain model and the same model sharded, and compares."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_plugin import ConfigurationError, HyperAdamW, clip_grad_norm_, fully_shard
from tests.fsdp.twins import (
    Model,
    assert_at_rest,
    assert_gradients_equal,
    backward_and_compare,
    batch,
    full,
    losses,
    make_mesh,
    pair,
    shard_blocks,
)

Case = Callable[..., None]


class StoppedError(Exception):
    pass


def a_training_loop_with_our_optimizer_and_clipping(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = HyperAdamW(sharded.parameters(), lr=1e-2)
    for step in range(3):
        backward_and_compare(plain, sharded, step)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        found = clip_grad_norm_(sharded.parameters(), 0.05)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    for expected_weight, weight in zip(plain.parameters(), sharded.parameters()):
        torch.testing.assert_close(full(weight), expected_weight, rtol=1e-5, atol=1e-6)


def gradients_accumulate_into_what_is_there(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for step in range(3):
        backward_and_compare(plain, sharded, step)
    # One parameter's gradient dropped: its next one must start from nothing while the others go on.
    plain.last.bias.grad = None
    sharded.last.bias.grad = None
    backward_and_compare(plain, sharded, 3)


def a_gradient_zeroed_in_place_accumulates_from_zero(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for step in range(2):
        plain.zero_grad(set_to_none=False)
        sharded.zero_grad(set_to_none=False)
        backward_and_compare(plain, sharded, step)


def reduced_gradients_survive_micro_batches_without_all_reduce(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    backward_and_compare(plain, sharded, 0)
    before = [full(p.grad).clone() for p in sharded.parameters()]
    sharded.set_requires_all_reduce(False)
    for step in (1, 2):
        reference, mine = losses(plain, sharded, step)
        reference.backward()
        mine.backward()
    if replicate > 1:
        for old, parameter in zip(before, sharded.parameters()):
            assert torch.equal(old, full(parameter.grad)), "a partial sum must not touch what is already reduced"
    sharded.set_requires_all_reduce(True)
    backward_and_compare(plain, sharded, 3)


def unsynchronised_gradients_are_kept_unsharded_and_reduced_later(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    sharded.set_requires_gradient_sync(False)
    for step in (0, 1):
        reference, mine = losses(plain, sharded, step)
        reference.backward()
        mine.backward()
        assert all(p.grad is None for p in sharded.parameters())
    sharded.set_requires_gradient_sync(True)
    backward_and_compare(plain, sharded, 2)


def sums_instead_of_means(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    sharded.set_gradient_divide_factor(1.0)
    reference, mine = losses(plain, sharded, 0)
    reference.backward()
    mine.backward()
    assert_gradients_equal(plain, sharded, factor=float(replicate * shard))


def frozen_parameters_get_no_gradient_and_no_reduction(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for model in (plain, sharded):
        for parameter in (*model.blocks[1].parameters(), model.blocks[2].up.weight):
            parameter.requires_grad_(False)
    backward_and_compare(plain, sharded, 0)
    if shard > 1:
        trainable_units = 4  # three blocks and the root
        assert sharded.fsdp_counters().reduce_scatters == trainable_units
    for model in (plain, sharded):
        model.blocks[1].up.weight.requires_grad_(True)
    backward_and_compare(plain, sharded, 1)


def a_unit_whose_gradients_do_not_arise_reduces_zeros(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for model in (plain, sharded):
        model.blocks[3].register_forward_hook(lambda _m, args, _out: args[0] * 2.0)
    backward_and_compare(plain, sharded, 0)


def a_module_used_twice_gets_the_sum(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for model in (plain, sharded):
        block = model.blocks[1]
        model.blocks[2].register_forward_hook(lambda _m, _args, out, block=block: block(out))
    backward_and_compare(plain, sharded, 0)
    backward_and_compare(plain, sharded, 1)


def several_forwards_before_their_backwards(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    pending = [losses(plain, sharded, step) for step in range(3)]
    for reference, mine in pending:
        reference.backward()
        mine.backward()
    assert_gradients_equal(plain, sharded)
    assert_at_rest(sharded)


def checkpointing(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    for kind in ("reentrant", "non-reentrant", "pairs"):
        for reshard_after_forward in (True, False):
            plain, sharded = pair(mesh, reshard_after_forward=reshard_after_forward)
            sharded.checkpointing = kind
            for step in range(2):
                reference, mine = losses(plain, sharded, step)
                reference.backward()
                mine.backward()
                assert_gradients_equal(plain, sharded)
                assert_at_rest(sharded)


def evaluation_sees_the_weights_of_after_the_step(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    for reshard_after_forward in (True, False):
        plain, sharded = pair(mesh, reshard_after_forward=reshard_after_forward)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, sharded)]
        for step in range(2):
            with torch.no_grad():
                torch.testing.assert_close(sharded(batch(9)[0]), plain(batch(9)[0]), rtol=1e-4, atol=1e-5)
            assert_at_rest(sharded)
            backward_and_compare(plain, sharded, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def a_forward_without_backward_leaves_a_sharded_state_dict(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard), reshard_after_forward=False)
    sharded(batch(0)[0])
    state = sharded.state_dict()
    assert all(isinstance(v, DTensor) for v in state.values())
    assert_at_rest(sharded)
    backward_and_compare(plain, sharded, 0)


def loaded_weights_are_used(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    for assign in (False, True):
        backward_and_compare(plain, sharded, 0)
        plain.load_state_dict({k: 0.5 * v for k, v in plain.state_dict().items()})
        halved = {k: (0.5 * v).detach() for k, v in sharded.state_dict().items()}
        sharded.load_state_dict(halved, assign=assign)
        for model in (plain, sharded):
            model.zero_grad()
        backward_and_compare(plain, sharded, 1)


def a_model_made_on_meta_is_materialised_after_sharding(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    plain = Model()
    with torch.device("meta"):
        sharded = Model()
    shard_blocks(sharded, mesh)
    with pytest.raises(ConfigurationError, match="meta device.*to_empty"):
        sharded(batch(0)[0])
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for source, target in zip(plain.parameters(), sharded.parameters()):
            local = target._local_tensor
            rows = torch.chunk(source, shard)
            rank = mesh.get_local_rank("dp_shard")
            local.copy_(rows[rank] if rank < len(rows) else local)
    backward_and_compare(plain, sharded, 0)


def a_failed_forward_or_backward_leaves_the_model_usable(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))

    def stop(*_: object) -> None:
        raise StoppedError

    handle = sharded.blocks[2].up.register_forward_hook(stop)
    for _ in range(2):
        with pytest.raises(StoppedError):
            sharded(batch(0)[0])
    handle.remove()
    backward_and_compare(plain, sharded, 0)

    def stop_gradient(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(stop)

    handle = sharded.blocks[2].up.register_forward_hook(stop_gradient)
    sharded.zero_grad()
    plain.zero_grad()
    output = sharded(batch(0)[0]).sum()
    with pytest.raises(StoppedError):
        output.backward()
    handle.remove()
    sharded.zero_grad()
    backward_and_compare(plain, sharded, 1)


def prefetch_lists_change_nothing_but_time(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    blocks = list(sharded.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, i - 2) : i])))
    for step in range(2):
        backward_and_compare(plain, sharded, step)


def prefetch_budgets_change_nothing_but_time(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    for budget in (0, 1, 1 << 40):
        for kind in ("none", "reentrant", "pairs"):
            plain, sharded = pair(mesh, prefetch=budget)
            sharded.checkpointing = kind
            for step in range(3):
                backward_and_compare(plain, sharded, step)
            order = (0, 2, 1, 1)  # another order, a module used twice, one not at all
            for model in (plain, sharded):
                model.blocks = nn.ModuleList([model.blocks[i] for i in order])
            for step in range(3):
                backward_and_compare(plain, sharded, step)


def unshard_and_reshard_by_hand(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    handle = sharded.blocks[0].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(sharded.blocks[0].up.weight, plain.blocks[0].up.weight)
    sharded.blocks[0].reshard()
    assert_at_rest(sharded)
    backward_and_compare(plain, sharded, 0)


def parameters_kept_through_backward(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    sharded.set_reshard_after_backward(False)
    reference, mine = losses(plain, sharded, 0)
    reference.backward()
    mine.backward()
    gathers = sharded.fsdp_counters().all_gathers
    sharded.set_reshard_after_backward(True)
    sharded.set_reshard_after_forward(False)
    backward_and_compare(plain, sharded, 1)
    assert sharded.fsdp_counters().all_gathers == gathers, "the second micro-batch must find the parameters gathered"


def a_backward_that_is_not_the_last_does_not_wait(replicate: int, shard: int) -> None:
    plain, sharded = pair(make_mesh(replicate, shard))
    sharded.set_is_last_backward(False)
    reference, mine = losses(plain, sharded, 0)
    reference.backward()
    mine.backward()
    sharded.set_is_last_backward(True)
    backward_and_compare(plain, sharded, 1)


def inputs_of_every_kind_are_followed(replicate: int, shard: int) -> None:
    """A unit with several inputs, in nests and keywords, and one that changes its input in place."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.outer = nn.Linear(5, 3)

        def forward(self, pair: tuple[Tensor, list[Tensor]], *, scale: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"y": self.outer(torch.tanh(self.inner(pair[0]) + pair[1][0]) * scale["s"])}

    class Shifter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            x += 1.0
            return self.shift(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.shifter = Shifter()
            self.mixer = Mixer()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.shifter(x * 2.0)
            return self.mixer((x, [y]), scale={"s": torch.sigmoid(y)})["y"]

    mesh = make_mesh(replicate, shard)
    torch.manual_seed(7)
    plain = Whole()
    sharded = copy.deepcopy(plain)
    for module in (sharded.shifter, sharded.mixer, sharded):
        fully_shard(module, mesh=mesh)
    for step in range(3):
        backward_and_compare(plain, sharded, step)


def two_models_do_not_see_each_other(replicate: int, shard: int) -> None:
    mesh = make_mesh(replicate, shard)
    plain_a, a = pair(mesh)
    plain_b, b = pair(mesh)
    a.set_requires_all_reduce(False)
    reference_a, mine_a = losses(plain_a, a, 0)
    backward_and_compare(plain_b, b, 1)
    reference_a.backward()
    mine_a.backward()
    a.set_requires_all_reduce(True)
    backward_and_compare(plain_a, a, 2)
    assert a.fsdp_counters() is not b.fsdp_counters()


def a_steady_step_builds_no_dtensor_and_the_counts_fit(replicate: int, shard: int) -> None:
    _, sharded = pair(make_mesh(replicate, shard))
    optimizer = HyperAdamW(sharded.parameters(), lr=1e-3)

    def step(index: int) -> None:
        for micro_batch in range(3):
            sharded.set_requires_all_reduce(micro_batch == 2)
            sharded(batch(index)[dist.get_rank()]).square().mean().backward()
        clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    sharded.fsdp_counters().reset()
    constructed = 0
    new = DTensor.__new__

    def counting(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal constructed
        constructed += 1
        return new(cls, *args, **kwargs)

    DTensor.__new__ = counting  # type: ignore[method-assign, assignment]
    try:
        step(1)
    finally:
        DTensor.__new__ = new  # type: ignore[method-assign]
    counters = sharded.fsdp_counters()
    assert constructed == 0
    assert counters.gradient_dtensors_built == 0
    units, micro_batches = 5, 3
    gathers_per_micro_batch = 2 * (units - 1) + 1  # the root is kept between forward and backward
    assert counters.all_gathers == (gathers_per_micro_batch * micro_batches if shard > 1 else 0)
    assert counters.reduce_scatters == (units * micro_batches if shard > 1 else 0)
    # All units together are smaller than the smallest message that a link is given.
    assert counters.all_reduces == (1 if replicate > 1 else 0)


def a_deleted_model_is_freed(replicate: int, shard: int) -> None:
    import weakref

    _, sharded = pair(make_mesh(replicate, shard))
    sharded(batch(0)[0]).sum().backward()
    alive = weakref.ref(sharded.blocks[0])
    del sharded
    gc.collect()
    assert alive() is None


CASES: list[Case] = [
    a_training_loop_with_our_optimizer_and_clipping,
    gradients_accumulate_into_what_is_there,
    a_gradient_zeroed_in_place_accumulates_from_zero,
    reduced_gradients_survive_micro_batches_without_all_reduce,
    unsynchronised_gradients_are_kept_unsharded_and_reduced_later,
    sums_instead_of_means,
    frozen_parameters_get_no_gradient_and_no_reduction,
    a_unit_whose_gradients_do_not_arise_reduces_zeros,
    a_module_used_twice_gets_the_sum,
    several_forwards_before_their_backwards,
    checkpointing,
    evaluation_sees_the_weights_of_after_the_step,
    a_forward_without_backward_leaves_a_sharded_state_dict,
    loaded_weights_are_used,
    a_model_made_on_meta_is_materialised_after_sharding,
    a_failed_forward_or_backward_leaves_the_model_usable,
    prefetch_lists_change_nothing_but_time,
    prefetch_budgets_change_nothing_but_time,
    unshard_and_reshard_by_hand,
    parameters_kept_through_backward,
    a_backward_that_is_not_the_last_does_not_wait,
    inputs_of_every_kind_are_followed,
    two_models_do_not_see_each_other,
    a_steady_step_builds_no_dtensor_and_the_counts_fit,
    a_deleted_model_is_freed,
]
