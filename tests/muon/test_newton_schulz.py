"""Newton-Schulz kernels against the polynomial in float64, and the exact mode against torch.optim.Muon."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hp_plugin.core.muon import newton_schulz
from hp_plugin.core.muon.coefficients import SETS, resolve_coefficients
from hp_plugin.core.muon.newton_schulz import KERNEL_TABLE, NewtonSchulz, orthogonalize_reference
from hp_plugin.errors import ConfigurationError, UnsupportedError

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CLASSIC = resolve_coefficients("classic")
SHAPES = [(7, 13), (13, 7), (33, 65), (1, 64), (64, 1), (130, 64), (64, 64), (96, 256), (1, 1), (24, 500)]

# Every kernel in every dtype that it runs in.
KERNELS = [
    ("loop", BF16),
    ("batched", BF16),
    ("loop", FP16),
    ("batched", FP16),
    ("gram", FP16),
    ("loop", FP32),
    ("batched", FP32),
    ("gram", FP32),
    ("gram", FP64),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices are small here: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decaying(m: int, n: int, decades: int = 3) -> Tensor:
    """(m, n), m <= n, singular values spaced evenly on a log scale from 1 to 10^-decades."""
    u, _, v = torch.linalg.svd(gaussian(m, n, seed=7), full_matrices=False)
    return (u * torch.logspace(0, -decades, m)) @ v


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def of_torch(gradient: Tensor, steps: int = 5) -> Tensor:
    """The weight after one step of torch.optim.Muon from zero: minus the scaled, orthogonalized gradient."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon appeared in torch 2.9")
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone(memory_format=torch.preserve_format)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, ns_steps=steps).step()
    return weight.detach()


def scaled_as_torch(orthogonal: Tensor) -> Tensor:
    m, n = orthogonal.shape
    return torch.zeros(m, n).add_(orthogonal, alpha=-math.sqrt(max(1, m / n)))


# ------------------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("shape", [*SHAPES, (256, 256), (512, 130)])
def test_exact_mode_is_torch_bit_by_bit(shape: tuple[int, int]) -> None:
    stack = gaussian(3, *shape)
    found = NewtonSchulz(CLASSIC, exact=True)(stack)
    for index in range(3):
        assert torch.equal(scaled_as_torch(found[index]), of_torch(stack[index]))


def test_exact_mode_is_torch_for_gradients_in_any_layout() -> None:
    transposed, strided = gaussian(2, 40, 24).mT, gaussian(2, 24, 80)[:, :, ::2]
    for stack in (transposed, strided):
        found = NewtonSchulz(CLASSIC, exact=True)(stack)
        assert torch.equal(scaled_as_torch(found[1]), of_torch(stack[1]))


def test_bitwise_comparison_with_torch_notices_one_step_less_and_another_dtype() -> None:
    gradient = gaussian(33, 65)
    expected = of_torch(gradient)
    fewer = NewtonSchulz(CLASSIC[:4], exact=True)(gradient[None])[0]
    assert not torch.equal(scaled_as_torch(fewer), expected)
    finer = NewtonSchulz(CLASSIC, dtype=FP32)(gradient[None])[0].bfloat16()
    assert not torch.equal(scaled_as_torch(finer), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loop_in_bfloat16_is_the_exact_mode_up_to_rounding(shape: tuple[int, int]) -> None:
    stack = gaussian(2, *shape, seed=3)
    found = NewtonSchulz(CLASSIC, kernel="loop")(stack)
    assert distance(found, NewtonSchulz(CLASSIC, exact=True)(stack)) <= 3e-2


# --------------------------------------------------------------------------------------------- against the polynomial


def test_reference_applies_the_polynomial_to_singular_values() -> None:
    matrix = gaussian(9, 14).double()
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for a, b, c in CLASSIC:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalize_reference(matrix, CLASSIC), (u * s) @ v, rtol=0, atol=1e-10)


# Largest relative distance to the float64 polynomial: on a Gaussian matrix, and with singular values down to 1e-3.
TOLERANCES = {
    (BF16, False): (3e-2, 2e-1),
    (FP16, False): (5e-3, 3e-2),
    (FP16, True): (3e-2, 6e-2),
    (FP32, False): (2e-5, 5e-5),
    (FP32, True): (1e-4, 1e-4),
    (FP64, True): (1e-12, 1e-11),
}


@pytest.mark.parametrize("name", sorted(SETS))
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
def test_every_kernel_is_close_to_the_polynomial_of_its_set(
    kernel: newton_schulz.Kernel, dtype: torch.dtype, name: str, tall: bool
) -> None:
    coefficients = resolve_coefficients(name)
    wide = torch.stack([gaussian(48, 160), decaying(48, 160)])
    stack = wide.mT if tall else wide
    found = NewtonSchulz(coefficients, dtype=dtype, kernel=kernel)(stack)
    assert found.dtype == dtype and found.shape == stack.shape
    for index, tolerance in enumerate(TOLERANCES[dtype, kernel == "gram"]):
        assert distance(found[index], orthogonalize_reference(stack[index], coefficients)) <= tolerance


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("name", ["quintic5", "polar_express5", "polar_express8_first5", "polar_express8", "two_phase"])
def test_singular_values_of_a_gaussian_matrix_come_near_one(
    kernel: newton_schulz.Kernel, dtype: torch.dtype, name: str
) -> None:
    run = NewtonSchulz(resolve_coefficients(name), dtype=dtype, kernel=kernel)
    for m, n in ((64, 128), (40, 160)):
        values = torch.linalg.svdvals(run(gaussian(1, m, n))[0].double())
        assert values.min() >= 0.8 and values.max() <= 1.2


def test_the_classic_set_is_outside_that_band() -> None:
    values = torch.linalg.svdvals(NewtonSchulz(CLASSIC, dtype=FP64)(gaussian(1, 64, 128))[0])
    assert values.min() < 0.8


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(KERNELS),
    st.sampled_from([BF16, FP16, FP32, FP64]),
    st.integers(0, 1 << 16),
)
def test_any_stack_of_any_dtype_is_close_to_the_polynomial(
    batch: int, m: int, n: int, chosen: tuple[newton_schulz.Kernel, torch.dtype], given_dtype: torch.dtype, seed: int
) -> None:
    kernel, dtype = chosen
    stack = gaussian(batch, m, n, seed=seed).to(given_dtype)
    before = stack.clone()
    found = NewtonSchulz(CLASSIC, dtype=dtype, kernel=kernel)(stack)
    assert torch.equal(stack, before)
    assert found.shape == stack.shape and found.dtype == dtype
    for index in range(batch):
        # Square matrices can be near-singular, and then 8 bits lose the smallest singular vector: hence the wide bound.
        tolerance = 0.3 if dtype == BF16 else 0.1 if dtype == FP16 else 1e-2
        assert distance(found[index], orthogonalize_reference(stack[index], CLASSIC)) <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_batched_and_loop_agree(shape: tuple[int, int], dtype: torch.dtype) -> None:
    stack = gaussian(4, *shape, seed=5)
    loop = NewtonSchulz(CLASSIC, dtype=dtype, kernel="loop")(stack)
    batched = NewtonSchulz(CLASSIC, dtype=dtype, kernel="batched")(stack)
    if dtype == FP32:
        torch.testing.assert_close(batched, loop, rtol=0, atol=1e-5)
    else:
        assert distance(batched, loop) <= 3e-2


@pytest.mark.parametrize("name", ["polar_express8", "two_phase"])
def test_gram_looks_at_the_matrix_again_often_enough_for_long_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coefficients, matrix = resolve_coefficients(name), decaying(48, 160)
    run = NewtonSchulz(coefficients, dtype=FP16, kernel="gram")
    expected = orthogonalize_reference(matrix, coefficients)
    assert distance(run(matrix[None])[0], expected) <= 6e-2
    # With one look after step 2 alone, which is enough for five steps, it is not.
    monkeypatch.setattr(newton_schulz, "_SEGMENT", 100)
    assert not distance(run(matrix[None])[0], expected) <= 6e-2


def test_gram_in_float32_survives_a_matrix_of_nearly_rank_one() -> None:
    coefficients = resolve_coefficients("two_phase")
    matrix = torch.outer(gaussian(48, seed=1), gaussian(160, seed=2)) + 1e-3 * gaussian(48, 160)
    found = NewtonSchulz(coefficients, dtype=FP32, kernel="gram")(matrix[None])[0]
    assert distance(found, orthogonalize_reference(matrix, coefficients)) <= 2e-3


def spectra() -> Iterator[Tensor]:
    """Matrices of 48 x 400 that the Gram form finds hard, and a Gaussian one."""
    yield gaussian(48, 400)
    yield decaying(48, 400)
    yield decaying(48, 400, decades=6)
    yield torch.outer(gaussian(48, seed=1), gaussian(400, seed=2)) + 1e-3 * gaussian(48, 400)
    yield gaussian(48, 4) @ gaussian(4, 400, seed=1)
    yield torch.zeros(48, 400)


@pytest.mark.parametrize("name", ["classic", "quintic5", "polar_express5", "polar_express8_first5"])
def test_the_factor_of_a_gram_matrix_orthogonalizes_the_matrix(name: str) -> None:
    coefficients = resolve_coefficients(name)
    run = NewtonSchulz(coefficients)
    assert run.allows_gram_exchange
    stack = torch.stack(list(spectra()))
    found = run.gram_factor(stack @ stack.mT) @ stack
    for index, matrix in enumerate(stack):
        error = (found[index] - orthogonalize_reference(matrix, coefficients)).norm()
        assert error <= 5e-3 * orthogonalize_reference(matrix, coefficients).norm()


@pytest.mark.parametrize("name", ["polar_express8", "two_phase"])
def test_long_sets_are_not_taken_in_one_look_at_the_gram_matrix(name: str) -> None:
    coefficients = resolve_coefficients(name)
    run = NewtonSchulz(coefficients)
    assert not run.allows_gram_exchange
    # Why: the rounding of the Gram matrix alone already ruins them.
    worst = 0.0
    for matrix in spectra():
        found = run.gram_factor(matrix @ matrix.T) @ matrix
        expected = orthogonalize_reference(matrix, coefficients)
        worst = max(worst, 1.0 if not found.isfinite().all() else float((found - expected).norm() / 7))
    assert worst > 2e-2


@pytest.mark.usefixtures("matmul_precision")
def test_the_gram_exchange_is_for_what_it_makes_more_accurate() -> None:
    assert NewtonSchulz(CLASSIC).allows_gram_exchange
    assert not NewtonSchulz(CLASSIC, exact=True).allows_gram_exchange
    assert not NewtonSchulz(CLASSIC, kernel="batched").allows_gram_exchange
    torch.set_float32_matmul_precision("medium")
    assert not NewtonSchulz(CLASSIC).allows_gram_exchange


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_flops_of_a_gram_factor_are_those_of_the_products_that_run(steps: int) -> None:
    run = NewtonSchulz(resolve_coefficients("classic", steps))
    gram = torch.eye(24).expand(2, 24, 24)
    with FlopCounterMode(display=False) as counter:
        run.gram_factor(gram)
    assert counter.get_total_flops() == 2 * run.gram_flops(24, 100) == 2 * run.gram_flops(100, 24)


# -------------------------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize(("kernel", "dtype", "exact"), [("auto", BF16, True), *((*pair, False) for pair in KERNELS)])
def test_zero_matrices_stay_zero_and_leave_the_others_alone(
    kernel: newton_schulz.Kernel, dtype: torch.dtype, exact: bool
) -> None:
    run = NewtonSchulz(CLASSIC, dtype=dtype, kernel=kernel, exact=exact)
    stack = torch.stack([torch.zeros(12, 30), gaussian(12, 30)])
    found = run(stack)
    assert not found[0].any()
    assert torch.equal(found[1], run(stack[1:].repeat(2, 1, 1))[1])


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", [(1, 50), (50, 1)])
def test_a_single_row_keeps_its_direction(
    kernel: newton_schulz.Kernel, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    row = gaussian(*shape)
    found = NewtonSchulz(CLASSIC, dtype=dtype, kernel=kernel)(row[None])[0]
    length = 1.0
    for a, b, c in CLASSIC:
        length = a * length + b * length**3 + c * length**5
    assert distance(found, row / row.norm() * length) <= {BF16: 3e-2, FP16: 5e-3}.get(dtype, 1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_empty_stacks_come_back_empty(shape: tuple[int, int, int]) -> None:
    found = NewtonSchulz(CLASSIC)(torch.empty(shape))
    assert found.shape == shape and found.dtype == BF16


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_the_transpose_is_orthogonalized_to_the_transpose(kernel: newton_schulz.Kernel, dtype: torch.dtype) -> None:
    run = NewtonSchulz(CLASSIC, dtype=dtype, kernel=kernel)
    stack = gaussian(2, 20, 50)
    assert torch.equal(run(stack.mT.contiguous()), run(stack).mT)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_a_power_of_two_in_the_gradient_changes_nothing(kernel: newton_schulz.Kernel, dtype: torch.dtype) -> None:
    run = NewtonSchulz(CLASSIC, dtype=dtype, kernel=kernel)
    stack = gaussian(2, 20, 50)
    assert torch.equal(run(stack * 2.0**12), run(stack))
    assert torch.equal(run(stack * 2.0**-6), run(stack))


def test_float16_takes_gradients_beyond_its_own_range() -> None:
    stack = gaussian(2, 20, 50)
    run = NewtonSchulz(CLASSIC, dtype=FP16)
    assert torch.equal(run(stack * 2.0**40), run(stack))


def test_a_matrix_of_norm_below_eps_is_not_blown_up() -> None:
    tiny = gaussian(1, 8, 20) * 1e-12
    found = NewtonSchulz(CLASSIC, dtype=FP32)(tiny)[0]
    assert distance(found, orthogonalize_reference(tiny[0], CLASSIC, eps=1e-7)) <= 1e-5
    assert found.norm() < 0.1


def test_the_result_can_be_taken_from_parameters_that_need_gradients() -> None:
    stack = gaussian(2, 6, 9).requires_grad_()
    assert not NewtonSchulz(CLASSIC)(stack).requires_grad


# --------------------------------------------------------------------------------------------------- choice of kernel


@pytest.mark.parametrize(
    ("dtype", "m", "n", "batch", "device", "kernel"),
    [
        (FP32, 512, 2048, 4, "cpu", "gram"),
        (FP32, 2048, 512, 4, "cuda", "gram"),
        (FP32, 512, 512, 4, "cpu", "loop"),
        (FP32, 512, 512, 4, "cuda", "batched"),
        (FP32, 16, 64, 64, "cpu", "batched"),
        (FP32, 64, 256, 64, "cpu", "loop"),
        (FP16, 512, 2048, 1, "npu", "gram"),
        (FP16, 512, 768, 1, "npu", "batched"),
        (BF16, 512, 2048, 4, "cpu", "loop"),
        (BF16, 512, 2048, 1, "cuda", "batched"),
        (BF16, 64, 64, 64, "cpu", "batched"),
        (BF16, 64, 64, 1, "cpu", "loop"),
        (FP64, 512, 2048, 4, "cpu", "loop"),
    ],
)
def test_auto_takes_the_kernel_of_the_table(
    dtype: torch.dtype, m: int, n: int, batch: int, device: str, kernel: str
) -> None:
    assert NewtonSchulz(CLASSIC, dtype=dtype).kernel_for(m, n, batch, device) == kernel


@settings(deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 99),
    st.sampled_from([BF16, FP16, FP32, FP64]),
)
def test_whether_auto_is_gram_depends_on_neither_device_nor_batch(
    m: int, n: int, batch: int, dtype: torch.dtype
) -> None:
    run = NewtonSchulz(CLASSIC, dtype=dtype)
    chosen = {run.kernel_for(m, n, b, device) == "gram" for b in (1, batch) for device in ("cpu", "cuda", "npu")}
    assert len(chosen) == 1
    assert not (dtype == BF16 and chosen == {True})


def test_the_last_row_of_the_table_admits_everything() -> None:
    assert KERNEL_TABLE[-1] == newton_schulz.KernelRule("batched", KERNEL_TABLE[-1].reason)


@pytest.mark.usefixtures("matmul_precision")
def test_gram_in_float32_is_not_run_on_products_of_less_precision() -> None:
    torch.set_float32_matmul_precision("medium")
    assert NewtonSchulz(CLASSIC, dtype=FP32).kernel_for(512, 2048, 1, "cpu") == "loop"
    assert NewtonSchulz(CLASSIC, dtype=FP16).kernel_for(512, 2048, 1, "cpu") == "gram"
    with pytest.raises(UnsupportedError, match="set_float32_matmul_precision"):
        NewtonSchulz(CLASSIC, dtype=FP32, kernel="gram")(gaussian(1, 4, 9))


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("loop", BF16), ("batched", FP32), ("gram", FP32), ("gram", FP16), ("auto", FP32)]
)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("shape", [(64, 64), (48, 400), (400, 48)])
def test_flops_are_those_of_the_products_that_run(
    kernel: newton_schulz.Kernel, dtype: torch.dtype, steps: int, shape: tuple[int, int]
) -> None:
    run = NewtonSchulz(resolve_coefficients("classic", steps), dtype=dtype, kernel=kernel)
    with FlopCounterMode(display=False) as counter:
        run(gaussian(2, *shape))
    assert counter.get_total_flops() == 2 * run.flops(*shape)


def test_flops_of_both_forms_meet_at_one_and_a_half() -> None:
    direct, gram = (NewtonSchulz(CLASSIC, dtype=FP32, kernel=kernel) for kernel in ("loop", "gram"))
    assert direct.flops(100, 150) == gram.flops(100, 150) == 5 * (4 * 100**2 * 150 + 2 * 100**3)
    assert direct.flops(100, 151) > gram.flops(100, 151)
    assert gram.flops(100, 400) == 8 * 100**2 * 400 + 28 * 100**3


# ---------------------------------------------------------------------------------------------------------- refusals


def test_gram_in_bfloat16_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match='"gram" in bfloat16 is numerically unusable'):
        NewtonSchulz(CLASSIC, kernel="gram")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exact": True, "dtype": FP32}, "iterates in bfloat16, and the dtype is float32"),
        ({"exact": True, "kernel": "batched"}, 'loops over matrices, and the kernel is "batched"'),
        ({"dtype": torch.int32}, "not in int32"),
        ({"kernel": "fast"}, "kernel='fast'"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"coefficients": ()}, "one .a, b, c. per step"),
        ({"coefficients": (1.0, 2.0)}, "one .a, b, c. per step"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        NewtonSchulz(**{"coefficients": CLASSIC, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("stack", [torch.zeros(4, 5), torch.zeros(1, 4, 5, dtype=torch.int64), torch.zeros(1, 2, 3, 4)])
def test_what_is_no_stack_of_matrices_is_refused(stack: Tensor) -> None:
    with pytest.raises(ConfigurationError, match=r"a single matrix is a stack of 1"):
        NewtonSchulz(CLASSIC)(stack)
