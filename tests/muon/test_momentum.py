"""Momentum: torch's running mean, the running sum, and that a shard has the bits of its part of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_plugin.core.muon.momentum import advance, look_ahead_without_gradient
from tests.muon.layouts import bounded
from tests.muon.reference import ReferenceMuon, values


def options(kind: str = "ema", *, momentum: float = 0.9, nesterov: bool = True) -> dict[str, Any]:
    return {"momentum_kind": kind, "momentum": momentum, "nesterov": nesterov}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["ema", "heavy_ball"])
def test_buffers_are_those_of_the_definition(kind: str, nesterov: bool) -> None:
    buffer, chosen = torch.zeros(5, 3), options(kind, nesterov=nesterov)
    reference = ReferenceMuon([torch.zeros(5, 3)], momentum=0.9, nesterov=nesterov, heavy_ball=kind == "heavy_ball")
    exact = torch.zeros(5, 3, dtype=torch.float64)
    for step in range(4):
        [gradient] = values([(5, 3)], step)
        found = advance(buffer, gradient, chosen)
        reference.step([gradient])
        mu, new = 0.9, gradient.double()
        if kind == "ema":
            exact = mu * exact + (1 - mu) * new
            ahead = mu * exact + (1 - mu) * new
        else:
            exact = mu * exact + new
            ahead = mu * exact + new
        torch.testing.assert_close(found.double(), ahead if nesterov else exact, rtol=1e-6, atol=1e-7)
        assert torch.equal(buffer, reference.buffers[0])


def test_both_conventions_lead_in_one_direction() -> None:
    mean, total = torch.zeros(4, 6), torch.zeros(4, 6)
    for step in range(5):
        [gradient] = values([(4, 6)], step)
        one = advance(mean, gradient, options("ema"))
        other = advance(total, gradient, options("heavy_ball"))
        torch.testing.assert_close(one, other * (1 - 0.9), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mean, total * (1 - 0.9), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["ema", "heavy_ball"])
@given(rows=st.integers(1, 9), cols=st.integers(1, 19), start=st.integers(0, 8), nesterov=st.booleans())
@bounded(40)
def test_a_shard_has_the_bits_of_its_part(kind: str, rows: int, cols: int, start: int, nesterov: bool) -> None:
    start = min(start, rows - 1)
    whole = values([(rows, cols)], 1)[0]
    part = whole[start:].clone()
    [gradient] = values([(rows, cols)], 2)
    chosen = options(kind, nesterov=nesterov)
    found, of_part = advance(whole, gradient, chosen), advance(part, gradient[start:].clone(), chosen)
    assert torch.equal(found[start:], of_part)
    assert torch.equal(whole[start:], part)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["ema", "heavy_ball"])
def test_no_gradient_looks_ahead_as_zeros_would_and_changes_nothing(kind: str, nesterov: bool) -> None:
    [buffer] = values([(3, 4)], 1)
    before, twin = buffer.clone(), buffer.clone()
    found = look_ahead_without_gradient(buffer, options(kind, nesterov=nesterov))
    assert torch.equal(buffer, before)
    torch.testing.assert_close(found, advance(twin, torch.zeros(3, 4), options(kind, nesterov=nesterov)))


def test_bfloat16_gradients_are_taken_into_a_float32_buffer() -> None:
    """A mean in bfloat16 would stop: 0.05 of a small gradient is below half a unit in the last place."""
    buffer = torch.ones(2, 2)
    advance(buffer, torch.full((2, 2), 1.01, dtype=torch.bfloat16), options(momentum=0.999))
    assert buffer.dtype == torch.float32
    assert float(buffer[0, 0]) != 1.0
    rounded = torch.ones(2, 2, dtype=torch.bfloat16)
    advance(rounded, torch.full((2, 2), 1.01, dtype=torch.bfloat16), options(momentum=0.999))
    assert float(rounded[0, 0]) == 1.0


def test_without_nesterov_nothing_is_copied() -> None:
    buffer = torch.zeros(2, 2)
    assert advance(buffer, torch.ones(2, 2), options(nesterov=False)) is buffer
    assert advance(buffer, torch.ones(2, 2), options()) is not buffer
