"""Faults that users of other implementations of Muon reported, and that must not exist here.

Those of fused weights, routing and Newton-Schulz itself are in the tests of these modules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin import HyperMuon, clip_grad_norm_
from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.splits import Convolution
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError
from tests.muon import ranks
from tests.muon.layouts import flat, grid, strided
from tests.muon.reference import reference_run, values
from tests.muon.simulation import SimulatedCommunicators, assert_same, distribute, shard_of, simulate, train
from tests.support import run_ranks

SHAPES = [(16, 12), (9, 20), (16, 12), (5, 5)]
WEIGHTS = values(SHAPES, 1)
GRADIENTS = [values(SHAPES, 2), values(SHAPES, 3)]
EXPECTED = reference_run(WEIGHTS, GRADIENTS)
MESHES = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (2, 2, 1), (2, 2, 2)]


def on(sizes: tuple[int, int, int]) -> list[Layout]:
    return [grid(shape, sizes) for shape in SHAPES]


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "R{}F{}T{}".format(*sizes))
def test_updates_are_orthogonal_on_every_mesh(sizes: tuple[int, int, int]) -> None:
    """On ZeRO-0 Newton-Schulz never ran and the optimizer was silently SGD; elsewhere it was AdamW under another name.

    https://github.com/deepspeedai/DeepSpeed/issues/8441, https://github.com/hiyouga/LLaMA-Factory/issues/8041
    """
    trained = train(on(sizes), WEIGHTS, GRADIENTS[:1], lr=1.0, weight_decay=0.0, scale="none")
    assert sum(each.newton_schulz_calls for each in trained.counters) == len(SHAPES)
    for after, before, gradient in zip(trained.weights, WEIGHTS, GRADIENTS[0], strict=True):
        update = before - after
        singular = torch.linalg.svdvals(update)
        assert float(singular.min()) > 0.4 and float(singular.max()) < 1.4
        along = float((update * gradient).sum() / (update.norm() * gradient.norm()))
        assert 0 < along < 0.99  # neither the gradient nor its sign
        signs = gradient.sign()
        assert float((update * signs).sum() / (update.norm() * signs.norm())) < 0.99


def test_micro_batches_are_orthogonalized_together() -> None:
    """On ZeRO-3 Newton-Schulz ran once for each micro-batch, so accumulation changed the result.

    https://github.com/deepspeedai/DeepSpeed/issues/8443
    """
    parts = [values(SHAPES, 20 + index) for index in range(4)]
    summed = [parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i] for i in range(len(SHAPES))]
    layouts = on((1, 2, 2))

    def work(communicators: SimulatedCommunicators) -> tuple[list[torch.Tensor], int]:
        params = [nn.Parameter(shard_of(w, each, communicators.rank)) for w, each in zip(WEIGHTS, layouts, strict=True)]
        optimizer = HyperMuon(
            params,
            exact=True,
            distributions={p: distribute(layout) for p, layout in zip(params, layouts, strict=True)},
            communicators=communicators,
        )
        for part in parts:
            for param, value, layout in zip(params, part, layouts, strict=True):
                mine = shard_of(value, layout, communicators.rank)
                param.grad = mine if param.grad is None else param.grad + mine
        optimizer.step()
        return [param.detach() for param in params], optimizer.counters.newton_schulz_calls

    results = simulate(4, work)
    assert sum(calls for _, calls in results) == len(SHAPES)
    expected = reference_run(WEIGHTS, [summed]).weights
    for rank, (found, _) in enumerate(results):
        assert_same(found, [shard_of(each, layout, rank) for each, layout in zip(expected, layouts, strict=True)])


@pytest.mark.parametrize("width", [16, 256])
def test_a_clip_of_gradients_leaves_the_size_of_updates(width: int) -> None:
    """The default clip of 1.0 divided the orthogonalized update by its norm, 85 for a width of 8192.

    https://github.com/deepspeedai/DeepSpeed/issues/8439, https://github.com/deepspeedai/DeepSpeed/pull/7776
    """
    [weight], [gradient] = values([(width, width)], 1), values([(width, width)], 2)
    moved = []
    for factor in (1e-3, 1.0, 1e3):  # below and above the clip
        param = nn.Parameter(weight.clone())
        optimizer = HyperMuon([param], lr=0.1, weight_decay=0.0)
        param.grad = gradient * factor
        clip_grad_norm_([param], 1.0)
        optimizer.step()
        moved.append(float((param.detach() - weight).norm()))
    # Singular values are within about 0.7 and 1.2.
    assert all(0.1 * 0.6 * width**0.5 < each < 0.1 * 1.3 * width**0.5 for each in moved)
    assert max(moved) < 1.02 * min(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumes_whatever_the_dtype_of_its_weights(dtype: torch.dtype) -> None:
    """A momentum saved in one dtype and loaded in that of the gradients stopped the resumed run.

    https://github.com/deepspeedai/DeepSpeed/issues/7746, https://github.com/deepspeedai/DeepSpeed/pull/8433
    """
    params = [nn.Parameter(weight.to(dtype, copy=True)) for weight in WEIGHTS]
    optimizer = HyperMuon(params)

    def step(of: list[nn.Parameter], by: HyperMuon, seed: int) -> None:
        for param, value in zip(of, values(SHAPES, seed), strict=True):
            param.grad = value.to(dtype)
        by.step()

    step(params, optimizer, 2)
    again = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = HyperMuon(again)
    resumed.load_state_dict(optimizer.state_dict())
    assert all(resumed.state[param]["momentum_buffer"].dtype == torch.float32 for param in again)
    step(params, optimizer, 3)
    step(again, resumed, 3)
    assert_same([param.detach() for param in again], [param.detach() for param in params])


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (3, 2, 1)], ids=lambda sizes: "R{}F{}".format(*sizes))
def test_replicas_of_shards_use_the_whole_gradient(sizes: tuple[int, int, int]) -> None:
    """Owners were chosen over all data-parallel ranks while gradients were reduced within one instance only.

    https://github.com/NVIDIA/Megatron-LM/pull/6048
    """
    trained = train(on(sizes), WEIGHTS, GRADIENTS, exact=True)
    assert_same(trained.weights, EXPECTED.weights)
    assert_same(trained.momenta, EXPECTED.buffers)


def test_the_norm_counts_each_element_of_experts_once() -> None:
    """With expert and tensor parallelism the norm of gradients left out parts of the experts.

    https://github.com/NVIDIA/Megatron-LM/pull/5916
    """
    for found, expected in run_ranks(4, ranks.norm_of_experts_and_dense):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True, "ns_dtype": torch.float32},
        {"scale": "spectral"},
        {"kernel": "gram"},
        {"steps": 3, "coefficients": "polar_express5"},
    ],
    ids=str,
)
def test_options_that_exclude_one_another_say_what_to_do(options: dict[str, Any]) -> None:
    """A combination was refused with a message that named neither reason nor way out.

    https://github.com/NVIDIA/Megatron-LM/issues/2164
    """
    with pytest.raises(HyperParallelError) as failure:
        HyperMuon([nn.Parameter(torch.ones(3, 3))], **options)
    message = str(failure.value)
    assert any(name in message for name in (*options, "Newton-Schulz"))
    assert any(word in message for word in ("Use", "use", "ask for", "say", "take", "and the dtype is"))


@pytest.mark.parametrize("momentum_placement", ["replicated", "owner"])
def test_every_rank_saves_the_same_keys(momentum_placement: str) -> None:
    """State that existed on owners alone, or after the first gradient alone, could not be saved or loaded.

    https://github.com/NVIDIA/Megatron-LM/issues/2625, https://github.com/NVIDIA/Megatron-LM/issues/2617,
    https://github.com/microsoft/dion/issues/89. Checkpoints of other meshes: test_processes.py.
    """
    layouts = [grid(shape, (2, 3, 1)) for shape in [(2, 4), (7, 3), (1, 5)]]  # some ranks hold nothing

    def work(communicators: SimulatedCommunicators) -> list[Any]:
        rank = communicators.rank
        params = [nn.Parameter(shard_of(torch.ones(each.global_shape), each, rank)) for each in layouts]
        optimizer = HyperMuon(
            params,
            momentum_placement=momentum_placement,
            distributions={p: distribute(layout) for p, layout in zip(params, layouts, strict=True)},
            communicators=communicators,
        )
        found = []
        for step in range(2):
            state = optimizer.state_dict()["state"]
            found.append({index: sorted(each) for index, each in state.items()})
            assert all(state[i]["momentum_buffer"].shape == param.shape for i, param in enumerate(params))
            for param in params:
                param.grad = torch.full_like(param, 1.0 + step)
            optimizer.step()
        return found

    results = simulate(6, work)
    assert all(each == results[0] for each in results)
    assert results[0] == [{index: ["momentum_buffer"] for index in range(3)}] * 2


def test_empty_shards_and_zero_gradients_stay_finite() -> None:
    """Newton-Schulz of an FSDP shard gave -inf: it was no matrix, or had no elements, or a norm of zero.

    https://github.com/MoonshotAI/Moonlight/issues/27
    """
    shapes = [(2, 6), (1, 4), (6, 6)]
    layouts = [flat(shape, 4) for shape in shapes]
    for gradients in (values(shapes, 2), [torch.zeros(shape) for shape in shapes]):
        trained = train(layouts, values(shapes, 1), [gradients, gradients])
        assert all(bool(each.isfinite().all()) for each in [*trained.weights, *trained.momenta])
    # A zero gradient moves nothing but the decay.
    torch.testing.assert_close(trained.weights[0], values(shapes, 1)[0] * (1 - 0.02 * 0.1) ** 2)


def test_flattened_parameters_are_refused_at_once() -> None:
    """ZeRO and FSDP1 hand over slices of flat memory: a KeyError, or an assertion about dims in the first step.

    https://github.com/MoonshotAI/Moonlight/issues/6, https://github.com/modelscope/ms-swift/issues/6953,
    https://github.com/modelscope/ms-swift/issues/9394
    """
    with pytest.raises(UnsupportedError, match=r"shape \(64,\) is no matrix.*algorithm"):
        HyperMuon([nn.Parameter(torch.ones(64))])
    param = nn.Parameter(torch.ones(32, 2))
    with pytest.raises(ConfigurationError, match="has the local shape"):
        HyperMuon([param], distributions={param: distribute(flat((64, 2), 1))}).plan  # noqa: B018


def test_a_muon_set_that_became_empty_is_refused_and_zeros_are_kept() -> None:
    """All parameters fell to AdamW unnoticed, and `value or default` replaced a weight decay of 0.0.

    Found in a review of verl-SpeCo, pull request 91.
    """
    with pytest.raises(ConfigurationError, match="no parameter goes to Muon"):
        HyperMuon([{"params": [nn.Parameter(torch.ones(4))], "algorithm": "adamw"}])
    group = HyperMuon([nn.Parameter(torch.ones(4, 4))], weight_decay=0.0, momentum=0.0, lr=0.0).param_groups[0]
    assert (group["weight_decay"], group["momentum"], group["lr"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("placements", "budget"),
    [
        ((Replicate(), Shard(0)), 2),
        ((Replicate(), Shard(1)), 2),
        ((Shard(0), Shard(1)), 2),
        ((Replicate(), Replicate()), 1),
    ],
    ids=str,
)
def test_no_layout_falls_back_to_gathering_everything(placements: tuple[Any, Any], budget: int) -> None:
    """On every HSDP mesh the fast path was left for a full gather, unnoticed.

    https://github.com/ByteDance-Seed/VeOmni/pull/1011
    """
    shapes = [(8, 8)] * 12
    layouts = [Layout(shape, ("a", "b"), (2, 2), placements) for shape in shapes]
    trained = train(layouts, values(shapes, 1), [values(shapes, 2)])
    for counters in trained.counters:
        assert counters.collectives == budget
        assert counters.newton_schulz_calls == 3
    shards = len(trained.plans[0].waves[0].shards[0])
    least = len(shapes) * 64 * (shards - 1 + 4 - 1) // shards
    assert sum(each.received_bytes - each.flag_bytes for each in trained.counters) == 2 * least


def test_shards_of_tensor_parallel_weights_keep_their_global_shape() -> None:
    """FSDP forgot the global shape of what TP had cut: "shape is invalid for input of size 16384".

    https://github.com/mindspore-ai/hyper-parallel/issues/189
    """
    for sizes in ((1, 2, 2), (1, 3, 2), (2, 2, 2)):
        for layouts in (on(sizes), [strided(shape, sizes) for shape in SHAPES]):
            assert_same(train(layouts, WEIGHTS, GRADIENTS, exact=True).weights, EXPECTED.weights)


def test_replicas_over_two_axes_hold_the_same_bits() -> None:
    """Broadcasts along one axis of replicas after the other raced and left replicas different.

    https://github.com/mindspore-ai/hyper-parallel/issues/189. That replicas agree is asserted where they are assembled.
    """
    for placements in ((Replicate(), Replicate(), Shard(0)), (Replicate(), Shard(1), Replicate())):
        layouts = [Layout(shape, ("a", "b", "c"), (2, 2, 2), placements) for shape in SHAPES]
        trained = train(layouts, WEIGHTS, GRADIENTS, exact=True, wave_bytes=400)
        assert_same(trained.weights, EXPECTED.weights)
        assert sum(each.newton_schulz_calls for each in trained.counters) == len(SHAPES)


def test_strided_shards_are_taken() -> None:
    """A distributed Muon refused the placement that FSDP2 gives to tensor-parallel weights.

    https://github.com/pytorch/torchtitan/issues/3353
    """
    placements = (_StridedShard(0, split_factor=3), Shard(0))
    layouts = [Layout(shape, ("shard", "tensor"), (2, 3), placements) for shape in SHAPES]
    assert_same(train(layouts, WEIGHTS, GRADIENTS, exact=True).weights, EXPECTED.weights)


def test_convolutions_are_matrices_of_outputs_by_all_else() -> None:
    """Muon refused weights of more than 2 dims.

    https://github.com/pytorch/pytorch/issues/166209
    """
    [weight], [gradient] = values([(8, 3, 2, 2)], 1), values([(8, 3, 2, 2)], 2)
    layout = flat((8, 3, 2, 2), 3)
    trained = train([layout], [weight], [[gradient]], splits=[Convolution(1)], exact=True)
    expected = reference_run([weight.flatten(1)], [[gradient.flatten(1)]]).weights[0]
    assert torch.equal(trained.weights[0].flatten(1), expected)


def test_updates_below_the_resolution_of_bfloat16_survive() -> None:
    """Masters that were meant to be float32 were bfloat16, and small updates vanished in them.

    https://github.com/huggingface/accelerate/issues/3979
    """
    for moved in run_ranks(2, ranks.small_update_of_mixed_precision):
        assert all(0 < each < 2**-9 for each in moved)


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_square_matrices_on_uneven_shards_are_not_padded(shards: int) -> None:
    """Rows of zeros that even out shards turn a square matrix into a tall one: in bfloat16 another result by 1 to 2 %.

    Seen in the source of https://github.com/microsoft/dion (commit 0a059a4), which pads before it chooses to transpose.
    """
    shapes = [(16, 16), (7, 7), (31, 31)]
    weights, gradients = values(shapes, 1), [values(shapes, 2)]
    trained = train([flat(shape, shards) for shape in shapes], weights, gradients, exact=True)
    assert_same(trained.weights, reference_run(weights, gradients).weights)
