"""Clipping on a mesh gives what torch gives on one process, whatever the placements, and keeps ranks in step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.optim import clip_grad_norm_, clip_grads_with_norm_, total_grad_norm
from hp_plugin.core.topology import Topology, TrafficRecorder
from hp_plugin.errors import ConfigurationError
from tests.optim.parameters import (
    MESHES,
    full,
    make_mesh,
    no_dtensor_work,
    plain_parameters,
    set_gradients,
    sharded_parameters,
)
from tests.support import init_gloo, run_ranks

NORM_TYPES = [2.0, 1.0, 3.0, math.inf]


def clip_on_mesh(*, shape: tuple[int, int]) -> None:
    init_gloo()
    params, reference = sharded_parameters(make_mesh(shape)), plain_parameters()
    for norm_type in NORM_TYPES:
        for max_norm in (0.5, 1e6):
            set_gradients(params, 3)
            set_gradients(reference, 3)
            with no_dtensor_work():
                found = clip_grad_norm_(params, max_norm, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
            assert type(found) is torch.Tensor
            assert found.shape == ()
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            for param, value in zip(params, reference, strict=True):
                torch.testing.assert_close(full(param.grad), value.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_norm_and_gradients_equal_one_process(shape: tuple[int, int]) -> None:
    run_ranks(shape[0] * shape[1], clip_on_mesh, timeout=180.0, shape=shape)


def clip_mixed_layouts() -> dict[str, int]:
    """Parameters sharded over one axis, the other, both, neither, and a plain one, in one call."""
    init_gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(4, 6, generator=generator) for _ in range(5)]
    params = [nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, list(layout))) for layout in layouts]
    for param, value, layout in zip(params, values[:4], layouts, strict=True):
        param.grad = distribute_tensor(value.clone(), mesh, list(layout))
    plain = nn.Parameter(torch.zeros(4, 6))
    plain.grad = values[4].clone()
    params.append(plain)
    with TrafficRecorder(Topology.from_supernode_size(4, 4)) as recorder:
        found = clip_grad_norm_(params, 1.0)
    expected = torch.linalg.vector_norm(torch.stack(values))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for param, value in zip(params, values, strict=True):
        torch.testing.assert_close(full(param.grad), value / (expected + 1e-6), rtol=1e-6, atol=0)
    return dict(recorder.traffic.calls)


def test_each_set_of_shard_axes_is_reduced_once_over_its_own_groups() -> None:
    """One all-reduce for dp, one for tp, two for the parameter on both axes, none for replicated and plain ones."""
    assert run_ranks(4, clip_mixed_layouts) == [{"all_reduce": 4}] * 4


def clip_with_ranks_lacking_gradients() -> list[float]:
    init_gloo()
    rank = dist.get_rank()
    params = sharded_parameters(make_mesh((2, 2)))
    set_gradients(params, 3)
    for index, param in enumerate(params):
        if (index + rank) % 2:
            param.grad = None
    norms = [clip_grad_norm_(params, 1.0).item()]
    for param in params:
        param.grad = None
    return [*norms, clip_grad_norm_(params, 1.0).item()]


def test_ranks_that_differ_in_gradients_stay_in_step() -> None:
    results = run_ranks(4, clip_with_ranks_lacking_gradients)
    assert all(norms[0] > 0 for norms in results)
    assert all(norms[1] == 0 for norms in results)


def clip_half_precision() -> tuple[float, float]:
    """65,536 elements of 0.01 per rank: a bf16 sum of squares would stop growing long before the end."""
    init_gloo()
    mesh = make_mesh((1, 2))
    param = nn.Parameter(distribute_tensor(torch.zeros(131072, dtype=torch.bfloat16), mesh, [Replicate(), Shard(0)]))
    local = torch.full((65536,), 0.01, dtype=torch.bfloat16)
    param.grad = DTensor.from_local(local, mesh, param.placements, run_check=False)
    found = clip_grad_norm_([param], 1e9)
    assert found.dtype == torch.float32
    assert local_tensor(param.grad).dtype == torch.bfloat16
    return found.item(), math.sqrt(131072) * local[0].item()


def test_norms_of_bf16_gradients_are_accumulated_in_fp32() -> None:
    for found, expected in run_ranks(2, clip_half_precision):
        assert found == pytest.approx(expected, rel=1e-5)


def nonfinite() -> list[Any]:
    init_gloo()
    params = sharded_parameters(make_mesh((1, 2)))
    set_gradients(params, 1)
    if dist.get_rank() == 1:
        local_tensor(params[0].grad)[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="is nan, so they cannot be clipped"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    before = [local_tensor(param.grad).clone() for param in params]
    norm = clip_grad_norm_(params, 1.0)
    assert torch.isnan(norm)
    return [bool(torch.isnan(local_tensor(p.grad)).all()) for p, b in zip(params, before, strict=True) if b.numel()]


def test_a_nan_on_one_rank_raises_on_all() -> None:
    for flags in run_ranks(2, nonfinite):
        assert all(flags)  # as torch's: unless told to raise, nan is multiplied in


def test_double_precision_is_kept() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    param.grad = torch.tensor([1e-9, 1.0, 1.0], dtype=torch.float64)
    assert clip_grad_norm_(param, 1e9).dtype == torch.float64


def test_no_parameters_and_no_gradients_give_zero() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(plain_parameters(), 1.0).item() == 0.0


def test_generators_and_the_two_halves() -> None:
    params, reference = plain_parameters(), plain_parameters()
    set_gradients(params, 2, scale=10.0)
    set_gradients(reference, 2, scale=10.0)
    total = total_grad_norm(iter(params))
    clip_grads_with_norm_(iter(params), 1.0, total)
    assert torch.equal(total, clip_grad_norm_((p for p in reference), 1.0))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(params, reference, strict=True))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan, -math.inf])
def test_norm_types_that_are_not_positive_are_refused(norm_type: float) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive number or inf"):
        clip_grad_norm_(plain_parameters(), 1.0, norm_type)


def clip_wrong_placements() -> None:
    init_gloo()
    mesh = make_mesh((1, 2))
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Replicate(), Shard(0)]))
    param.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate(), Partial()])
    with pytest.raises(ConfigurationError, match="placed as .* but its gradient as"):
        clip_grad_norm_([param], 1.0)


def test_a_gradient_that_is_still_to_be_reduced_is_refused() -> None:
    run_ranks(2, clip_wrong_placements)
