"""Scaled accumulation and copy: the native kernels equal the torch references bit for bit, and know their limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hp_plugin.core.kernels import accumulate, native
from hp_plugin.errors import ConfigurationError

OPERATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "accumulate_scaled_": (accumulate.accumulate_scaled_, accumulate.accumulate_scaled_reference),
    "scale_copy_": (accumulate.scale_copy_, accumulate.scale_copy_reference),
}
# Odd tails for every vector width, one cache line, and sizes that several threads share unevenly.
SIZES = (0, 1, 7, 16, 17, 1023, (1 << 19) + 5, (1 << 20) + 16)


class NativeCalls:
    """Stands for the loaded library, passes calls on and counts them."""

    def __init__(self, library: native.NativeLibrary) -> None:
        self.names: list[str] = []
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        self.names.append(name)
        return getattr(self._library.functions, name)  # type: ignore[no-any-return]


@pytest.fixture
def native_calls(native_library: native.NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> NativeCalls:
    calls = NativeCalls(native_library)
    library = native.NativeLibrary(native_library.path, native_library.abi_version, native_library.build_info, calls)  # type: ignore[arg-type]
    monkeypatch.setattr(accumulate, "load_native", lambda: library)
    return calls


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


def test_what_the_native_kernel_does_not_cover_is_served_by_torch(native_calls: NativeCalls) -> None:
    dense = random(64, torch.float32, seed=3)
    cases = {
        "strided destination": (torch.zeros(128)[::2], dense),
        "strided source": (torch.zeros(64), random(128, torch.float32, seed=3)[::2]),
        "transposed": (torch.zeros(8, 8), dense.view(8, 8).t()),
        "float16 source": (torch.zeros(64), dense.half()),
        "bfloat16 destination": (torch.zeros(64, dtype=torch.bfloat16), dense),
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


def test_without_the_library_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = native.NativeStatus(None, "The native library is not installed.")
    monkeypatch.setattr(accumulate, "load_native", lambda: None)
    monkeypatch.setattr(accumulate, "native_status", lambda: absent)
    dst = torch.ones(9)
    accumulate.accumulate_scaled_(dst, torch.ones(9, dtype=torch.bfloat16), 2.0)
    assert torch.equal(dst, torch.full((9,), 3.0))
    choices = accumulate.chosen_kernels()
    assert {choice.implementation for choice in choices} == {"torch"}
    assert all(choice.reason == absent.reason for choice in choices if choice.device_type == "cpu")


def test_chosen_kernels_lists_every_operation(
    native_library: native.NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = native.NativeStatus(native_library, "The native library was loaded.")
    monkeypatch.setattr(accumulate, "native_status", lambda: found)
    choices = {(choice.operation, choice.device_type): choice for choice in accumulate.chosen_kernels()}
    assert {operation for operation, _ in choices} == set(OPERATIONS)
    for operation in OPERATIONS:
        assert choices[operation, "cpu"].implementation == "native"
        assert native_library.build_info in choices[operation, "cpu"].reason
        assert choices[operation, "other"].implementation == "torch"
