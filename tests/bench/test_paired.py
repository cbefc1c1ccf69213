"""Interleaving, per-round ratios, quartiles, and the rejection of rounds."""

from __future__ import annotations

import pytest

from bench import paired


def test_odd_rounds_run_backwards() -> None:
    assert list(paired.interleave(["a", "b", "c"], 3)) == [
        *[(0, "a"), (0, "b"), (0, "c")],
        *[(1, "c"), (1, "b"), (1, "a")],
        *[(2, "a"), (2, "b"), (2, "c")],
    ]


def test_linear_drift_within_rounds_cancels_over_a_pair_of_rounds() -> None:
    """Both variants cost the same; the machine slows down steadily. The mean position of each must be the same."""
    position = {"ours": 0, "peer": 0, "other": 0}
    for step, (_, variant) in enumerate(paired.interleave(list(position), 4)):
        position[variant] += step
    assert len(set(position.values())) == 1


def test_ratios_compare_inside_one_round() -> None:
    """The machine is ten times slower in the second round; a ratio of means would not be 0.5."""
    times = [{"ours": 1.0, "peer": 2.0, "x": 9.0}, {"ours": 10.0, "peer": 20.0}, {"ours": 3.0, "peer": 4.0}]
    assert paired.ratios(times, "ours", "peer") == [0.5, 0.5, 0.75]
    assert paired.ratios(times, "peer", "ours")[0] == 2.0


def test_ratios_of_incomplete_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="no round holds times of 'ours' and 'peer'"):
        paired.ratios([], "ours", "peer")
    with pytest.raises(ValueError, match=r"round 1 has no time of 'peer'; it has \['ours'\]"):
        paired.ratios([{"ours": 1.0, "peer": 1.0}, {"ours": 1.0}], "ours", "peer")
    with pytest.raises(ValueError, match=r"round 0 has a time that is not positive: 1\.0 and 0\.0"):
        paired.ratios([{"ours": 1.0, "peer": 0.0}], "ours", "peer")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], (7.0, 7.0, 7.0)),
        ([2.0, 1.0], (1.25, 1.5, 1.75)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (2.0, 3.0, 4.0)),
        ([4.0, 1.0, 3.0, 2.0], (1.75, 2.5, 3.25)),
    ],
)
def test_quartiles_interpolate_linearly(values: list[float], expected: tuple[float, float, float]) -> None:
    assert paired.quartiles(values) == pytest.approx(expected)


def test_quartiles_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round must be kept"):
        paired.quartiles([])


def test_selection_keeps_order_and_says_how_many_were_rejected() -> None:
    selection = paired.select([1.0, 1.2, 0.97, 1.04], lambda balance: paired.in_balance(balance, 1.0))
    assert selection.kept == [1.0, 0.97, 1.04]
    assert selection.rejected == [1.2]
    assert str(selection) == "1 of 4 rounds rejected"


def test_balance_is_relative_to_what_was_wanted() -> None:
    assert paired.in_balance(2.09, 2.0)
    assert not paired.in_balance(2.11, 2.0)
    assert not paired.in_balance(1.89, 2.0)
    assert paired.in_balance(2.11, 2.0, tolerance=0.06)
