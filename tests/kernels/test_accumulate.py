"""Scaled accumulation and copy: the native kernels equal the torch references bit for bit, and know their limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hp_plugin.core.kernels import accumulate
from hp_plugin.errors import ConfigurationError
from tests.kernels.native_calls import NativeCalls, bits, random

OPERATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "accumulate_scaled_": (accumulate.accumulate_scaled_, accumulate.accumulate_scaled_reference),
    "scale_copy_": (accumulate.scale_copy_, accumulate.scale_copy_reference),
}
# Odd tails for every vector width, one cache line, and sizes that several threads share unevenly.
SIZES = (0, 1, 7, 16, 17, 1023, (1 << 19) + 5, (1 << 20) + 16)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("alpha", [1.0, 1 / 3, -2.5])
def test_native_equals_reference(
    native_calls: NativeCalls, two_threads: None, operation: str, dtype: torch.dtype, size: int, alpha: float
) -> None:
    run, reference = OPERATIONS[operation]
    src = random(size, dtype, seed=1)
    found = random(size, torch.float32, seed=2)
    expected = found.clone()
    run(found, src, alpha)
    reference(expected, src, alpha)
    assert torch.equal(found, expected)
    suffix = "f32" if dtype == torch.float32 else "bf16"
    assert native_calls.names == [f"hp_{operation}{suffix}"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_reference_equals_double_arithmetic(operation: str) -> None:
    _, reference = OPERATIONS[operation]
    src, dst = random(257, torch.bfloat16, seed=1), random(257, torch.float32, seed=2)
    exact = src.double() * 0.3 + (dst.double() if operation == "accumulate_scaled_" else 0.0)
    reference(dst, src, 0.3)
    assert torch.allclose(dst.double(), exact, rtol=0.0, atol=4e-7)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_non_finite_values_are_kept(native_calls: NativeCalls, operation: str) -> None:
    run, _ = OPERATIONS[operation]
    values = [float("inf"), float("-inf"), float("nan"), 0.0]
    for dtype in (torch.float32, torch.bfloat16):
        dst = torch.zeros(4)
        run(dst, torch.tensor(values, dtype=dtype), 0.5)
        assert torch.equal(torch.nan_to_num(dst, nan=123.0), torch.nan_to_num(torch.tensor(values), nan=123.0))
    assert len(native_calls.names) == 2


@pytest.mark.parametrize("alpha", [1.0, 1 / 3])
@pytest.mark.parametrize("size", SIZES)
def test_native_cast_to_bfloat16_equals_torch(
    native_calls: NativeCalls, two_threads: None, size: int, alpha: float
) -> None:
    src = random(size, torch.float32, seed=1, offset=1)
    found, expected = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    accumulate.scale_copy_(found, src, alpha)
    accumulate.scale_copy_reference(expected, src, alpha)
    assert torch.equal(bits(found), bits(expected))
    assert native_calls.names == ["hp_scale_copy_f32_bf16"]


def test_native_cast_to_bfloat16_rounds_every_pattern_as_torch_does(native_calls: NativeCalls) -> None:
    # Every upper half (signs, denormals, infinities, NaNs) with lower halves around the tie.
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    patterns = (torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16 | lower).flatten()
    src = torch.where(patterns < 1 << 31, patterns, patterns - (1 << 32)).to(torch.int32).view(torch.float32)
    found = torch.zeros(src.numel(), dtype=torch.bfloat16)
    accumulate.scale_copy_(found, src, 1.0)
    assert native_calls.names == ["hp_scale_copy_f32_bf16"]
    assert torch.equal(bits(found), bits(src.to(torch.bfloat16)))
    assert torch.equal(found.isnan(), src.isnan())


def test_a_cast_onto_its_own_source_never_reaches_the_native_kernel(native_calls: NativeCalls) -> None:
    memory = torch.arange(64.0)
    narrow = memory.view(torch.bfloat16)
    accumulate.scale_copy_(narrow[:32], memory[32:], 1.0)  # disjoint parts of one storage
    assert native_calls.names == ["hp_scale_copy_f32_bf16"]
    assert torch.equal(narrow[:32].float(), torch.arange(32.0, 64.0))
    with pytest.raises(RuntimeError, match="single memory location|overlap"):
        accumulate.scale_copy_(narrow[:8], memory[:8], 1.0)  # the same address, two dtypes
    assert len(native_calls.names) == 1


def test_what_the_native_kernel_does_not_cover_is_served_by_torch(native_calls: NativeCalls) -> None:
    dense = random(64, torch.float32, seed=3)
    cases = {
        "strided destination": (torch.zeros(128)[::2], dense),
        "strided source": (torch.zeros(64), random(128, torch.float32, seed=3)[::2]),
        "transposed": (torch.zeros(8, 8), dense.view(8, 8).t()),
        "float16 source": (torch.zeros(64), dense.half()),
        "bfloat16 destination and source": (torch.zeros(64, dtype=torch.bfloat16), dense.bfloat16()),
        "float16 destination": (torch.zeros(64, dtype=torch.float16), dense),
        "strided bfloat16 destination": (torch.zeros(128, dtype=torch.bfloat16)[::2], dense),
        "float64": (torch.zeros(64, dtype=torch.float64), dense.double()),
    }
    for (name, (dst, src)), (operation, (run, _)) in itertools.product(cases.items(), OPERATIONS.items()):
        dst.fill_(1.0)
        run(dst, src, 0.25)
        exact = src.double() * 0.25 + (1.0 if operation == "accumulate_scaled_" else 0.0)
        assert torch.equal(dst, exact.to(dst.dtype)) or torch.allclose(dst.double(), exact, atol=1e-7), (
            name,
            operation,
        )
    assert native_calls.names == []


def test_narrow_destination_is_rounded_once() -> None:
    dst = torch.full((1,), 1.0, dtype=torch.bfloat16)
    src = torch.full((1,), 1.5 * 2.0**-8, dtype=torch.float32)
    accumulate.accumulate_scaled_(dst, src, 1.0)
    # 1 + 1.5 * 2**-8 lies above the midpoint between 1 and 1 + 2**-7: it rounds up.
    assert dst.item() == 1.0 + 2.0**-7


def test_in_place_scaling_of_one_array(native_calls: NativeCalls) -> None:
    values = random(1000, torch.float32, seed=4)
    expected = values * 0.125
    accumulate.scale_copy_(values, values, 0.125)
    assert torch.equal(values, expected)
    assert native_calls.names == ["hp_scale_copy_f32"]


def test_partly_overlapping_arrays_never_reach_the_native_kernel(native_calls: NativeCalls) -> None:
    memory = torch.arange(10.0)
    with pytest.raises(RuntimeError, match="single memory location|overlap"):
        accumulate.accumulate_scaled_(memory[1:], memory[:-1], 1.0)
    assert native_calls.names == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_write_is_noticed_by_autograd(native_calls: NativeCalls, operation: str) -> None:
    run, _ = OPERATIONS[operation]
    saved = torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * saved).sum()
    run(saved, torch.ones(4), 1.0)
    assert len(native_calls.names) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_are_written_without_being_recorded(native_calls: NativeCalls) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5))
    accumulate.accumulate_scaled_(parameter, torch.ones(5), 2.0)
    assert torch.equal(parameter.detach(), torch.full((5,), 2.0))
    assert parameter.grad_fn is None
    assert native_calls.names == ["hp_accumulate_scaled_f32"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("dst", "src"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, device="meta")),
    ],
    ids=["shape", "integer source", "integer destination", "device"],
)
def test_mismatched_operands_are_refused(operation: str, dst: Tensor, src: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="same shape, the same device and a floating-point dtype"):
        OPERATIONS[operation][0](dst, src, 1.0)
