"""Matrices that stay where they are while their Gram matrices travel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hp_plugin import ConfigurationError
from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.newton_schulz import NewtonSchulz, orthogonalize_reference
from tests.muon.reference import ReferenceMuon
from tests.muon.simulation import Trained, train

CLASSIC = resolve_coefficients("classic")
SKINNY = [
    pytest.param((8, 512), 1, 4, 2, id="wide"),
    pytest.param((512, 8), 0, 4, 1, id="tall"),
    pytest.param((510, 9), 0, 3, 2, id="uneven"),
    pytest.param((6, 9), 1, 4, 1, id="with an empty shard"),
    pytest.param((12, 12), 1, 3, 1, id="square"),
]


def on_mesh(shape: tuple[int, int], dim: int, shards: int, replicas: int) -> Layout:
    return Layout(shape, ("replicate", "shard"), (replicas, shards), (Replicate(), Shard(dim)))


def drawn(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_parameter(layout: Layout, steps: int = 1, **options: Any) -> Trained:
    shape = layout.global_shape
    gradients = [[drawn(shape, 10 + step)] for step in range(steps)]
    return train([layout], [drawn(shape, 1)], gradients, scale="none", **options)


@pytest.mark.parametrize(("shape", "dim", "shards", "replicas"), SKINNY)
def test_it_is_the_polynomial_in_float32(shape: tuple[int, int], dim: int, shards: int, replicas: int) -> None:
    layout = on_mesh(shape, dim, shards, replicas)
    found = one_parameter(layout, 3, exchange="gram")
    assert found.plans[0].waves[0].mode == "gram"
    reference = ReferenceMuon([drawn(shape, 1)], orthogonalize=lambda x: orthogonalize_reference(x, CLASSIC).float())
    reference_weights = reference.weights
    for step in range(3):
        _reference_step(reference, drawn(shape, 10 + step))
    torch.testing.assert_close(found.weights[0], reference_weights[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.momenta[0], reference.buffers[0])


def _reference_step(reference: ReferenceMuon, gradient: torch.Tensor) -> None:
    """Without a scale, as the runs above."""
    buffer = reference.buffers[0]
    buffer.lerp_(gradient, 1 - reference.momentum)
    update = reference.orthogonalize(gradient.lerp(buffer, reference.momentum))
    reference.weights[0].mul_(1 - reference.lr * reference.weight_decay).add_(update, alpha=-reference.lr)


@pytest.mark.parametrize(("shape", "dim", "shards", "replicas"), SKINNY[:3])
def test_bytes_are_those_of_the_gram_matrices(shape: tuple[int, int], dim: int, shards: int, replicas: int) -> None:
    layout = on_mesh(shape, dim, shards, replicas)
    found = one_parameter(layout, exchange="gram")
    messages = shards - 1 + shards * replicas - 1
    expected = messages * 4 * (min(shape) ** 2 + 1)
    assert sum(each.received_bytes for each in found.counters) == expected
    assert sum(sum(found.plans[0].received_elements(r)) for r in range(layout.num_ranks)) == messages * min(shape) ** 2
    pieces = one_parameter(layout, exchange="a2a")
    assert expected < 0.25 * sum(each.received_bytes for each in pieces.counters)
    assert sum(each.newton_schulz_calls for each in found.counters) == 1


@pytest.mark.parametrize("shards", [2, 4])
def test_auto_takes_it_where_it_needs_fewer_bytes(shards: int) -> None:
    for rows, mode in ((512 // (2 * shards) - 2, "gram"), (512 // (2 * shards) + 2, "a2a")):
        layout = on_mesh((rows, 512), 1, shards, 1)
        plan = one_parameter(layout).plans[0]
        assert plan.waves[0].mode == mode, (rows, shards)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (on_mesh((8, 512), 0, 4, 1), {}),
        (on_mesh((8, 512), 1, 4, 1), {"exact": True}),
        (on_mesh((8, 512), 1, 4, 2), {"momentum_placement": "owner"}),
        (on_mesh((8, 512), 1, 4, 1), {"kernel": "loop"}),
    ],
    ids=["short dim sharded", "exact", "momentum of one replica", "another kernel"],
)
def test_where_it_does_not_fit_it_is_refused_and_not_chosen(layout: Layout, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match='exchange="gram" does not fit parameter'):
        one_parameter(layout, exchange="gram", **options)
    assert one_parameter(layout, **options).plans[0].waves[0].mode == "a2a"


def test_large_domains_bring_factors_back_in_two_stages() -> None:
    layout = on_mesh((8, 512), 1, 2, 2)
    direct = one_parameter(layout, 2, exchange="gram")
    with mock.patch("hp_plugin.core.muon.plan.MAX_A2A_PEERS", 3):
        staged = one_parameter(layout, 2, exchange="gram")
    assert torch.equal(direct.weights[0], staged.weights[0])
    assert sum(c.received_bytes for c in staged.counters) == sum(c.received_bytes for c in direct.counters)


def test_a_matrix_without_gradient_stays() -> None:
    layout = on_mesh((8, 512), 1, 4, 1)
    weight = drawn((8, 512), 1)
    found = train([layout], [weight], [[None]], exchange="gram")
    assert torch.equal(found.weights[0], weight)
    assert sum(each.newton_schulz_calls for each in found.counters) == 0
    some = train([layout], [weight], [[drawn((8, 512), 2)]], has_gradient=lambda rank, _: rank == 1, exchange="gram")
    assert not torch.equal(some.weights[0], weight)


def test_the_factor_equals_the_iteration_and_zeros_stay() -> None:
    iteration = NewtonSchulz(CLASSIC, dtype=torch.float32)
    x = torch.stack([drawn((7, 40), 3), torch.zeros(7, 40), 1e-4 * drawn((7, 40), 4)])
    found = iteration.gram_factor(x @ x.mT) @ x
    torch.testing.assert_close(found, iteration(x), rtol=1e-4, atol=1e-5)
    assert not found[1].any()
