"""Coefficient sets: what the polynomials do, and that no set is cut short or stretched in silence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plugin.core.muon.coefficients import (
    ALIASES,
    SETS,
    Coefficients,
    coefficient_set,
    resolve_coefficients,
)
from hp_plugin.errors import ConfigurationError


def run(coefficients: tuple[Coefficients, ...], x: float) -> float:
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return x


def band(coefficients: tuple[Coefficients, ...], least: float) -> tuple[float, float]:
    """Smallest and largest value of the polynomial on [least, 1]."""
    points = [least ** (i / 2000) for i in range(2001)]
    values = [run(coefficients, x) for x in points]
    return min(values), max(values)


# Sum of the coefficients of every step times its number, taken of the tables of Emerging-Optimizers fd77292
# (emerging_optimizers/orthogonalized_optimizers/muon_utils.py) and dion 0a059a4 (dion/polar_express.py).
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("classic", 0.701),
        ("quintic5", 10.7321),
        ("polar_express5", 20.72426516742674),
        ("polar_express8", 41.7525),
        ("polar_express8_first5", 20.7501),
        ("two_phase", 44.236),
    ],
)
def test_the_numbers_are_those_of_the_source(name: str, total: float) -> None:
    steps = coefficient_set(name).steps
    assert math.fsum(number * sum(step) for number, step in enumerate(steps, 1)) == pytest.approx(total, abs=1e-10)


# The band that a set maps [least, 1] into.
@pytest.mark.parametrize(
    ("name", "least", "low", "high"),
    [
        ("classic", 1e-3, 0.47054, 1.20237),
        ("quintic5", 1e-3, 0.47498, 1.14502),
        ("polar_express5", 1e-3, 0.84665, 1.14113),
        ("polar_express8_first5", 1e-3, 0.84619, 1.12360),
        ("polar_express8", 2e-4, 0.88889, 1.0),
        ("two_phase", 2e-4, 1.0, 1.00054),
    ],
)
def test_each_set_brings_singular_values_into_its_band(name: str, least: float, low: float, high: float) -> None:
    assert band(resolve_coefficients(name), least) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("name", ["polar_express8", "two_phase"])
def test_sets_that_converge_end_in_a_step_that_leaves_one_alone(name: str) -> None:
    a, b, c = coefficient_set(name).steps[-1]
    assert a + b + c == 1
    assert a + 3 * b + 5 * c == pytest.approx(0, abs=1e-12)  # and flatly: errors of size e shrink to e^2


def test_classic_is_what_torch_takes_by_default() -> None:
    muon = pytest.importorskip("torch.optim._muon", reason="torch.optim.Muon appeared in torch 2.9")
    step = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
    assert resolve_coefficients("classic") == (step,) * muon.DEFAULT_NS_STEPS


@pytest.mark.parametrize(
    ("name", "steps"),
    [("classic", 5), ("quintic5", 5), ("polar_express5", 5), ("polar_express8", 8), ("two_phase", 10)],
)
def test_without_a_number_of_steps_a_set_gives_all_it_has(name: str, steps: int) -> None:
    assert len(resolve_coefficients(name)) == steps == len(resolve_coefficients(name, steps))


@pytest.mark.parametrize(
    ("name", "steps", "says"),
    [
        ("quintic5", 8, "exactly 5 steps and 8"),
        ("quintic5", 4, "exactly 5 steps and 4"),
        ("polar_express5", 6, "exactly 5 steps and 6"),
        ("polar_express8", 5, r"8 steps or more .* and 5 .*'polar_express8_first5'"),
        ("two_phase", 9, "10 steps or more .* and 9"),
    ],
)
def test_a_number_of_steps_that_a_set_has_not_is_refused(name: str, steps: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        resolve_coefficients(name, steps)


@settings(deadline=None)
@given(st.sampled_from(sorted(SETS)), st.integers(1, 99))
def test_a_set_gives_the_asked_number_of_its_own_steps_or_nothing(name: str, steps: int) -> None:
    chosen = SETS[name]
    try:
        taken = resolve_coefficients(name, steps)
    except ConfigurationError:
        assert steps < len(chosen.steps) or chosen.repeats == "none"
        return
    assert len(taken) == steps
    assert taken[1 : len(chosen.steps)] == chosen.steps[1:]
    assert set(taken[len(chosen.steps) :]) <= {chosen.steps[-1]}


@settings(deadline=None)
@given(st.floats(0.0, 1.0))
def test_the_safety_factor_is_a_division_of_the_matrix(x: float) -> None:
    chosen = coefficient_set("polar_express5")
    assert chosen.safety == 1.02
    assert run(chosen.take(), x) == pytest.approx(run(chosen.steps, x / 1.02), rel=1e-12)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_name_a_set(alias: str) -> None:
    assert coefficient_set(alias) is SETS[ALIASES[alias]]


def test_one_word_for_two_sets_is_refused_with_both() -> None:
    with pytest.raises(ConfigurationError, match="'polar_express5', 'polar_express8'"):
        resolve_coefficients("polar_express")
    with pytest.raises(ConfigurationError, match="'classic', 'quintic5'"):
        resolve_coefficients("quintic", 5)


def test_an_unknown_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="no coefficient set 'cubic'.*'classic'.*'megatron:quintic'"):
        coefficient_set("cubic")


def test_one_triple_is_every_step() -> None:
    assert resolve_coefficients((2, -1.5, 0.5), 3) == ((2.0, -1.5, 0.5),) * 3
    assert len(resolve_coefficients([2.0, -1.5, 0.5])) == 5


def test_triples_are_the_steps_themselves() -> None:
    steps = [[3.0, -4.0, 2.0], [2.0, -1.5, 0.5]]
    assert resolve_coefficients(steps) == resolve_coefficients(steps, 2) == ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
    three = [(3.0, -4.0, 2.0), (2.5, -2.0, 0.5), (2.0, -1.5, 0.5)]
    assert resolve_coefficients(three) == tuple(three)
    with pytest.raises(ConfigurationError, match="gives 2 steps and steps=5"):
        resolve_coefficients(steps, 5)


@pytest.mark.parametrize(
    "coefficients", [(), (1.0, 2.0), [(1.0, 2.0)], [1.0, 2.0, 3.0, 4.0], (1.0, math.nan, 2.0), [(1.0, 2.0, math.inf)]]
)
def test_what_is_not_triples_of_finite_numbers_is_refused(coefficients: object) -> None:
    with pytest.raises(ConfigurationError, match=r"coefficients"):
        resolve_coefficients(coefficients)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, 100, 2.0, True])
def test_steps_are_a_whole_number_from_1_to_99(steps: object) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        resolve_coefficients("classic", steps)  # type: ignore[arg-type]
