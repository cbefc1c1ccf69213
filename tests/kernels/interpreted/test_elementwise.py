"""Kernels of one pass over memory against their references, on odd sizes, with guards around what is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hp_plugin.core.kernels.accumulate import accumulate_scaled_reference, scale_copy_reference
from hp_plugin.core.kernels.adam import AdamOptions, AdamShard, adamw_reference
from hp_plugin.core.kernels.triton_kernels import launch, variants

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
GUARD = 77.0


def drawn(shape: int | tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def guarded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Memory with a guard on either side, and the values in it as a view that begins at an odd address."""
    memory = torch.full((values.numel() + 66,), GUARD, dtype=values.dtype)
    view = memory[33 : 33 + values.numel()]
    view.copy_(values.flatten())
    return memory, view.view(values.shape)


def assert_guards(memory: Tensor) -> None:
    assert (memory[:33] == GUARD).all() and (memory[-33:] == GUARD).all()


def assert_equal_or_neighbours(found: Tensor, expected: Tensor) -> None:
    """Bits equal; in bfloat16 at most one step apart, since the interpreter truncates where devices round."""
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-30)
    else:
        assert torch.equal(found, expected)


def test_the_interpreter_is_on() -> None:
    assert launch.INTERPRETS


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("size", [1, 7, 2047, 4099])
@pytest.mark.parametrize("accumulate", [False, True])
def test_scaling_equals_the_reference(source: torch.dtype, target: torch.dtype, size: int, accumulate: bool) -> None:
    src = drawn(size, source, 1)
    memory, found = guarded(drawn(size, target, 2))
    expected, version = found.clone(), found._version
    launch.scale_(found, src, 0.3, accumulate=accumulate)
    (accumulate_scaled_reference if accumulate else scale_copy_reference)(expected, src, float(torch.tensor(0.3)))
    assert_equal_or_neighbours(found, expected)
    assert_guards(memory)
    assert found._version > version


def test_a_grid_smaller_than_the_blocks_covers_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", {("cuda", "vector"): 3, ("cuda", "cube"): 2})
    src = drawn(20_001, torch.float32, 1)
    found = torch.zeros(20_001)
    launch.scale_(found, src, 2.0, accumulate=False)
    assert torch.equal(found, 2 * src)
    left = drawn((3, 130, 17), torch.float32, 2)
    out = torch.empty(3, 130, 130)
    launch.symmetric_product(left, left, out=out, add=None, alpha=1.0, beta=0.0, shift=0.0)
    torch.testing.assert_close(out, left @ left.mT, rtol=1e-5, atol=1e-5)


def test_more_elements_than_32_bits_count_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_COUNT", 1000)
    found = torch.ones(2501)
    launch.scale_(found, torch.arange(2501.0), 1.0, accumulate=True)
    assert torch.equal(found, 1 + torch.arange(2501.0))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("values", FLOATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 3), (3, 257), (9, 300)])
def test_decay_and_update_of_a_part_of_a_matrix(target: torch.dtype, values: torch.dtype, rows: int, cols: int) -> None:
    whole = drawn((rows + 4, cols + 5), target, 1)
    message = drawn((rows + 1, cols + 2), values, 2)
    part, update = whole[2 : 2 + rows, 3 : 3 + cols], message[1:, 1 : 1 + cols]
    exact = 0.875 * part.double() - 0.25 * update.double()  # exact factors, so that float32 rounds products alike
    before = whole.clone()
    launch.decay_update_(part, update, 0.875, -0.25)
    torch.testing.assert_close(part.double(), exact, rtol={4: 1e-6, 2: 2.0**-7}[target.itemsize], atol=1e-6)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[2 : 2 + rows, 3 : 3 + cols] = False
    assert torch.equal(whole[outside], before[outside])


@pytest.mark.parametrize(
    ("param", "grad"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16,) * 2]
)
@pytest.mark.parametrize("size", [1, 1025])
def test_adamw_equals_double_arithmetic_over_steps(param: torch.dtype, grad: torch.dtype, size: int) -> None:
    options = AdamOptions(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    memory, weights = guarded(drawn(size, param, 1))
    found = AdamShard(weights, drawn(size, grad, 2), *(torch.zeros(size, dtype=param) for _ in "mv"), torch.zeros(()))
    expected = AdamShard(*(tensor.double() for tensor in found))
    for step in range(1, 4):
        found.grad.copy_(drawn(size, grad, 10 + step))
        expected.grad.copy_(found.grad)
        launch.adamw_(*found[:4], step=step, **options._asdict())
        adamw_reference(expected, options)
    tolerance = {4: 1e-5, 2: 1e-2}[param.itemsize]
    for mine, exact in zip(found[:4], expected[:4]):
        torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance * 0.1)
    assert_guards(memory)


def test_adamw_equals_torch() -> None:
    weights = drawn(3001, torch.float32, 1).requires_grad_()
    mine, means, squares = weights.detach().clone(), torch.zeros(3001), torch.zeros(3001)
    optimizer = torch.optim.AdamW([weights], lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(1, 4):
        weights.grad = drawn(3001, torch.float32, step)
        optimizer.step()
        options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        launch.adamw_(mine, weights.grad, means, squares, step=step, **options)
    torch.testing.assert_close(mine, weights.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1,), (5, variants.CHUNK, 3), (16, 2 * variants.CHUNK + 24)])
def test_sums_of_squares_of_tensors_that_lie_apart(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    tensors = [guarded(drawn(size, dtype, seed))[1] for seed, size in enumerate(sizes)]
    exact = sum(float((tensor.double() ** 2).sum()) for tensor in tensors)
    assert abs(float(launch.sums_of_squares(tensors)) - exact) < 1e-5 * exact
