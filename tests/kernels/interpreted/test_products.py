"""Symmetric products and the orthogonalization that is made of them, against whole products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hp_plugin.core.kernels import symmetric, table
from hp_plugin.core.kernels.triton_kernels import launch
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.newton_schulz import NewtonSchulz, orthogonalize_reference

ERROR = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 9e-3}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(out: Tensor, exact: Tensor) -> None:
    assert float((out.double() - exact).abs().max()) <= ERROR[out.dtype] * float(exact.abs().max())


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("batch", "m", "k"), [(1, 1, 1), (1, 37, 130), (2, 129, 65), (3, 128, 40)])
def test_x_xt(dtype: torch.dtype, batch: int, m: int, k: int) -> None:
    x = drawn((batch, m, k), dtype, 1)
    out = torch.full((batch + 1, m, m), 5.0, dtype=dtype)
    launch.symmetric_product(x, x, out=out[:batch], add=None, alpha=1.0, beta=0.0, shift=0.0)
    assert_product(out[:batch], x.double() @ x.double().mT)
    assert (out[batch:] == 5).all()


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("m", [30, 131])
def test_the_polynomial_step_and_commuting_factors(dtype: torch.dtype, m: int) -> None:
    x = drawn((2, m, 40), dtype, 1) / m
    r = (x @ x.mT).contiguous()
    r = ((r + r.mT) / 2).contiguous()
    out = torch.empty_like(r)
    launch.symmetric_product(r, r, out=out, add=r, alpha=2.0, beta=-4.75, shift=0.0)
    wide = r.double()
    assert_product(out, -4.75 * wide + 2 * wide @ wide)
    launch.symmetric_product(out, r, out=(other := torch.empty_like(r)), add=out, alpha=1.0, beta=3.5, shift=0.25)
    exact = out.double() @ wide.mT + 3.5 * out.double() + 0.25 * torch.eye(m)
    assert_product(other, (exact + exact.mT) / 2)


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("implementation", ["triton", "blocks", "torch"])
def test_the_result_is_symmetric_bit_for_bit(dtype: torch.dtype, implementation: str) -> None:
    x, y = drawn((2, 301, 64), dtype, 3), drawn((2, 301, 64), dtype, 4)
    mixed = symmetric.symmetric_product(x, y, implementation=implementation)  # not symmetric but for the mirroring
    assert torch.equal(mixed, mixed.mT.contiguous())
    assert_product(mixed.tril(), (x.double() @ y.double().mT).tril())


@pytest.mark.parametrize(
    ("dtype", "kernel", "shape", "error"),
    [
        (torch.float16, "gram", (257, 300), 1e-2),
        pytest.param(torch.bfloat16, "batched", (2, 300, 258), 3e-2, marks=pytest.mark.full),
        pytest.param(torch.float16, "gram", (2, 260, 700), 1e-2, marks=pytest.mark.full),
        pytest.param(torch.float16, "batched", (257, 300), 3e-3, marks=pytest.mark.full),
    ],
)
def test_orthogonalization_by_triton(
    as_cuda: table.Kernels,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kernel: str,
    error: float,
) -> None:
    calls: list[tuple[int, ...]] = []
    run = launch.symmetric_product

    def counted(left: Tensor, *arguments: Tensor, **options: object) -> None:
        calls.append(tuple(left.shape))
        run(left, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "symmetric_product", counted)
    steps = resolve_coefficients("quintic5", None)
    stack = drawn(shape if len(shape) == 3 else (1, *shape), torch.float32, 5)
    found = NewtonSchulz(steps, dtype=dtype, kernel=kernel)(stack)  # type: ignore[arg-type]
    for mine, matrix in zip(found, stack):
        exact = orthogonalize_reference(matrix, steps)
        assert float((mine.double() - exact).norm() / exact.norm()) < error
    assert calls
    assert min(stack.shape[-2:]) == calls[0][-2]


def test_gram_in_float32_by_blocks(as_cuda: table.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in table.KERNEL_TABLE if row.operation != "symmetric_product"]
    blocks = table.KernelRow("symmetric_product", "blocks", ("cuda",), (torch.float32,), "test", min_rows=16)
    monkeypatch.setattr(table, "KERNEL_TABLE", (*rows, blocks))
    assert symmetric.symmetric_choice("cpu", torch.float32, 20) == "blocks"
    steps = resolve_coefficients("classic", None)
    matrix = drawn((1, 37, 90), torch.float32, 6)
    found = NewtonSchulz(steps, dtype=torch.float32, kernel="gram")(matrix)[0]
    exact = orthogonalize_reference(matrix[0], steps)
    assert float((found.double() - exact).norm() / exact.norm()) < 2e-5
