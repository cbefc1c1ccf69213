"""Scale factors: each formula keeps what it is meant to keep, and libraries' names are never guessed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plugin.core.muon.scale import ALIASES, FORMULAS, scale_factor, scale_formula
from hp_plugin.errors import ConfigurationError

DIMS = st.integers(1, 1 << 20)


@pytest.mark.parametrize(
    ("mode", "tall", "wide"),
    [
        ("clamped_aspect", 2.0, 1.0),
        ("max_dim", 8.0, 8.0),
        ("aspect", 2.0, 0.5),
        ("adamw_rms", 1.6, 1.6),
        ("none", 1.0, 1.0),
    ],
)
def test_formulas_on_a_tall_and_a_wide_matrix(mode: str, tall: float, wide: float) -> None:
    assert scale_factor(mode, 64, 16) == pytest.approx(tall)
    assert scale_factor(mode, 16, 64) == pytest.approx(wide)
    assert scale_factor(mode, 64, 16, extra=0.5) == pytest.approx(tall / 2)


@settings(deadline=None)
@given(DIMS, DIMS)
def test_each_formula_keeps_its_invariant_of_an_orthogonalized_matrix(m: int, n: int) -> None:
    rms = math.sqrt(min(m, n) / (m * n))  # of the entries, all singular values being 1
    assert scale_factor("adamw_rms", m, n) * rms == pytest.approx(0.2)
    assert scale_factor("max_dim", m, n) * rms == pytest.approx(1.0)
    operator = math.sqrt(n / m)  # largest RMS of outputs for inputs of RMS 1
    assert scale_factor("aspect", m, n) * operator == pytest.approx(1.0)
    assert scale_factor("clamped_aspect", m, n) == max(scale_factor("aspect", m, n), 1.0)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_torch_names_are_the_factors_of_torch(shape: tuple[int, int]) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon appeared in torch 2.9")
    updates = {}
    for name in ("original", "match_rms_adamw"):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.eye(*shape)
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn=name).step()
        updates[name] = float(weight.detach().norm()) / scale_factor(f"torch:{name}", *shape)
    # Divided by its factor, either is the norm of the same orthogonalized matrix.
    assert updates["original"] == pytest.approx(updates["match_rms_adamw"])
    assert updates["original"] == pytest.approx(math.sqrt(min(shape)), rel=0.35)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_name_a_formula(alias: str) -> None:
    assert scale_formula(alias) in FORMULAS
    assert scale_factor(alias, 6, 3) == scale_factor(ALIASES[alias], 6, 3)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("spectral", r"'megatron:spectral' \(max_dim\), 'dion:spectral_norm' \(aspect\)"),
        ("spectral_norm", r"'dion:spectral_norm' \(aspect\)"),
        ("original", r"'keller:original' \(clamped_aspect\), 'torch:original' \(clamped_aspect\)"),
        ("match_rms_adamw", r"'torch:match_rms_adamw' \(adamw_rms\)"),
        ("unit_rms_norm", r"'megatron:unit_rms_norm' \(aspect\)"),
    ],
)
def test_a_library_name_without_the_library_is_refused_with_what_it_could_mean(mode: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        scale_factor(mode, 4, 4)


@pytest.mark.parametrize("mode", ["", "sqrt", "megatron:original"])
def test_an_unknown_name_is_refused_with_the_known_ones(mode: str) -> None:
    with pytest.raises(ConfigurationError, match="'clamped_aspect', 'max_dim', 'aspect', 'adamw_rms', 'none'"):
        scale_formula(mode)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_an_empty_matrix_has_no_scale(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="no scale"):
        scale_factor("aspect", *shape)
