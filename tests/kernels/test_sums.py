"""Sums in order: the native kernels equal the torch reference bit for bit, and refuse what they cannot add."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_plugin.core.kernels import native, sums
from hp_plugin.errors import ConfigurationError
from tests.kernels.native_calls import NativeCalls, bits, random

FUNCTIONS = {
    (torch.float32, torch.float32): "hp_sum_f32",
    (torch.bfloat16, torch.bfloat16): "hp_sum_bf16",
    (torch.bfloat16, torch.float32): "hp_sum_bf16_f32",
}
PAIRS = pytest.mark.parametrize(("narrow", "wide"), FUNCTIONS, ids=["f32", "bf16", "bf16 to f32"])
# Odd tails for every vector width, more than one block of the kernel, and sizes that two threads share unevenly.
SIZES = (0, 1, 17, 4096, 4099, (1 << 19) + 5)


def both(
    terms: list[Tensor], dtype: torch.dtype, scale: float, *, in_place: int | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """The result of `sum_in_order_` and of its reference, each on copies of the terms."""
    results = []
    for run in (sums.sum_in_order_, sums.sum_in_order_reference):
        copies = [torch.empty(len(term) + offset, dtype=term.dtype)[offset:].copy_(term) for term in terms]
        output = (
            torch.full((len(terms[0]) + offset,), 7.0, dtype=dtype)[offset:] if in_place is None else copies[in_place]
        )
        run(output, copies, scale)
        for index, (copy, term) in enumerate(zip(copies, terms)):
            assert index == in_place or torch.equal(bits(copy), bits(term)), "a source was written to"
        results.append(output)
    return results[0], results[1]


@PAIRS
@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("size", SIZES)
def test_native_equals_reference(
    native_calls: NativeCalls, two_threads: None, narrow: torch.dtype, wide: torch.dtype, terms: int, size: int
) -> None:
    sources = [random(size, narrow, seed=seed) for seed in range(terms)]
    small = [(1.0, 0), (1.0, 1), (0.25, 0), (1 / 3, 1)]
    cases = small if size < SIZES[-1] else small[-1:]
    for scale, offset in cases:
        found, expected = both(sources, wide, scale, offset=offset)
        assert torch.equal(bits(found), bits(expected)), (scale, offset)
    assert native_calls.names == [FUNCTIONS[narrow, wide]] * len(cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("position", [0, 1])
def test_the_output_may_be_the_first_or_the_second_term(
    native_calls: NativeCalls, two_threads: None, dtype: torch.dtype, terms: int, position: int
) -> None:
    if position >= terms:
        return
    for size in (33, (1 << 19) + 5):
        sources = [random(size, dtype, seed=seed) for seed in range(terms)]
        for scale in (1.0, 1 / 3) if size == 33 else (1 / 3,):
            found, expected = both(sources, dtype, scale, in_place=position)
            apart, _ = both(sources, dtype, scale)
            assert torch.equal(bits(found), bits(expected))
            assert torch.equal(bits(found), bits(apart))
    assert set(native_calls.names) == {FUNCTIONS[dtype, dtype]}


@PAIRS
def test_the_number_of_threads_does_not_change_a_bit(
    native_library: native.NativeLibrary, native_calls: NativeCalls, narrow: torch.dtype, wide: torch.dtype
) -> None:
    before = torch.get_num_threads()
    sources = [random((1 << 20) + 77, narrow, seed=seed) for seed in range(3)]
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            output = torch.zeros(len(sources[0]), dtype=wide)
            sums.sum_in_order_(output, sources, 0.5)
            results.append(bits(output))
    finally:
        torch.set_num_threads(before)
    assert len(native_calls.names) == 4
    assert all(torch.equal(results[0], other) for other in results[1:])


@PAIRS
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bit_patterns_add_up_as_in_torch(
    native_library: native.NativeLibrary, narrow: torch.dtype, wide: torch.dtype, data: st.DataObject
) -> None:
    # Infinities, NaNs, denormals, -0 and sums that overflow come with the patterns.
    integer, width = (torch.int16, 16) if narrow == torch.bfloat16 else (torch.int32, 32)
    size = data.draw(st.integers(1, 70))
    pattern = st.integers(-(1 << (width - 1)), (1 << (width - 1)) - 1)
    rows = data.draw(st.lists(st.lists(pattern, min_size=size, max_size=size), min_size=1, max_size=7))
    scale = data.draw(st.sampled_from([1.0, 0.5, 1 / 3, -2.0]))
    terms = [torch.tensor(row, dtype=integer).view(narrow) for row in rows]
    with mock.patch.object(sums, "load_native", return_value=native_library):
        found, expected = both(terms, wide, scale)
    assert torch.equal(bits(found), bits(expected))


def test_reference_adds_in_order_and_rounds_once() -> None:
    # 1 + 2**-9 + 2**-9 is 1 + 2**-8 in float32, a tie in bfloat16, which goes to even: 1. With 2**-8 more it is above.
    terms = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-9, 2.0**-9, 2.0**-8)]
    output = torch.zeros(1, dtype=torch.bfloat16)
    sums.sum_in_order_reference(output, terms[:3])
    assert output.item() == 1.0
    sums.sum_in_order_reference(output, terms)
    assert output.item() == 1.0 + 2.0**-7
    # The order decides what float32 absorbs.
    large = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0)]
    total = torch.zeros(1)
    sums.sum_in_order_reference(total, large)
    assert total.item() == 2.0**24
    sums.sum_in_order_reference(total, large[::-1])
    assert total.item() == 2.0**24 + 2.0


def test_what_the_native_kernel_does_not_cover_is_served_by_torch(native_calls: NativeCalls) -> None:
    cases = {
        "float16": (torch.zeros(8, dtype=torch.float16), torch.float16),
        "float64": (torch.zeros(8, dtype=torch.float64), torch.float64),
        "float32 to bfloat16": (torch.zeros(8, dtype=torch.bfloat16), torch.float32),
    }
    for name, (output, dtype) in cases.items():
        terms = [random(8, dtype, seed=seed) for seed in range(3)]
        sums.sum_in_order_(output, terms, 0.5)
        exact = sum(term.double() for term in terms) * 0.5
        assert torch.allclose(output.double(), exact, rtol=2.0**-8, atol=1e-6), name
    on_meta = torch.zeros(8, device="meta")
    sums.sum_in_order_(on_meta, [torch.zeros(8, device="meta")] * 2)
    assert native_calls.names == []


def test_the_write_is_noticed_by_autograd(native_calls: NativeCalls) -> None:
    saved = torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * saved).sum()
    sums.sum_in_order_(saved, [torch.ones(4), torch.ones(4)])
    assert native_calls.names == ["hp_sum_f32"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "terms",
    [
        [],
        [torch.zeros(4)],
        [torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)],
        [torch.zeros(3), torch.zeros(3, device="meta")],
        [torch.zeros(3, dtype=torch.int32)],
        [torch.zeros(6)[::2]],
    ],
    ids=["no term", "shape", "dtypes", "device", "integers", "strides"],
)
def test_terms_that_do_not_fit_are_refused(native_calls: NativeCalls, terms: list[Tensor]) -> None:
    with pytest.raises(ConfigurationError, match=r"sum_in_order_ was given the terms .* at least one term"):
        sums.sum_in_order_(torch.zeros(3), terms)
    assert native_calls.names == []


def test_an_output_that_overlaps_a_term_is_refused(native_calls: NativeCalls) -> None:
    memory = torch.zeros(32)
    output = memory[8:16]
    other = torch.zeros(8)
    for terms, index in (
        ([other, other, output], 2),
        ([memory[7:15], other], 0),
        ([other, memory[15:23]], 1),
    ):
        with pytest.raises(ConfigurationError, match=f"shares memory with term {index}"):
            sums.sum_in_order_(output, terms)
    narrow = memory.view(torch.bfloat16)[16:24]
    with pytest.raises(ConfigurationError, match="shares memory with term 0"):
        sums.sum_in_order_(output, [narrow, torch.zeros(8, dtype=torch.bfloat16)])
    assert native_calls.names == []
    sums.sum_in_order_(output, [memory[0:8], memory[16:24], memory[24:32]])  # neighbours share nothing
    assert native_calls.names == ["hp_sum_f32"]
