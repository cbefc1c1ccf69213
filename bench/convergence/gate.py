"""The gate: a run passes if it is no further from stock runs than a few times what stock runs are from one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LIMIT = 3.0
"""How many times the noise between stock runs a difference may be."""


@dataclass(frozen=True)
class Curve:
    """What one run left.

    Attributes:
        losses: Mean loss of every step over all ranks and micro-batches, before the step's update.
        weights: All weights after the last step, flattened to one fp32 vector; empty where the run stopped early.
    """

    losses: np.ndarray
    weights: np.ndarray


def loss_difference(a: Curve, b: Curve) -> float:
    """Largest difference of the losses over the steps that both have; inf where one is not a number."""
    steps = min(len(a.losses), len(b.losses))
    return _largest(a.losses[:steps], b.losses[:steps])


def weight_difference(a: Curve, b: Curve) -> float:
    """Largest difference of any weight after the last step; inf where one is not a number, nan where one stopped."""
    if not a.weights.size or not b.weights.size:
        return math.nan
    return _largest(a.weights, b.weights)


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(difference.max(initial=0.0)) if np.isfinite(difference).all() else math.inf


def pearson(a: Curve, b: Curve) -> float:
    """Pearson's correlation of the two loss curves, over the steps that both have."""
    steps = min(len(a.losses), len(b.losses))
    return float(np.corrcoef(a.losses[:steps], b.losses[:steps])[0, 1])


@dataclass(frozen=True)
class Noise:
    """How far stock runs are from one another, which differ in the order of their sums alone.

    Attributes:
        loss: Largest loss difference of any pair.
        weight: Largest weight difference of any pair.
        equal_pairs: Pairs whose losses and weights are equal bit by bit: they say nothing about noise.
    """

    loss: float
    weight: float
    equal_pairs: tuple[tuple[str, str], ...]

    @classmethod
    def between(cls, stock: Mapping[str, Curve]) -> Noise:
        """The noise of all pairs of `stock` runs, at least two.

        Raises:
            ValueError: There are fewer than two runs.
        """
        if len(stock) < 2:
            raise ValueError(f"noise needs two stock runs or more, got {list(stock)}")
        pairs = list(itertools.combinations(stock, 2))
        losses = {pair: loss_difference(stock[pair[0]], stock[pair[1]]) for pair in pairs}
        weights = {pair: weight_difference(stock[pair[0]], stock[pair[1]]) for pair in pairs}
        equal = tuple(pair for pair in pairs if losses[pair] == 0 and weights[pair] == 0)
        return cls(max(losses.values()), max(weights.values()), equal)


@dataclass(frozen=True)
class Verdict:
    """A run against the noise.

    Attributes:
        loss_ratio: Largest loss difference to any stock run over the noise.
        weight_ratio: The same of weights; nan where the run stopped before its last step.
        pearson: Least correlation with any stock run's losses.
    """

    loss_ratio: float
    weight_ratio: float
    pearson: float

    @property
    def passes(self) -> bool:
        """Whether both ratios were measured and are within the limit."""
        return self.loss_ratio <= LIMIT and self.weight_ratio <= LIMIT


def judge(run: Curve, stock: Mapping[str, Curve], noise: Noise) -> Verdict:
    """Holds `run` against every stock run. Where the noise is zero, only equality bit by bit gives a finite ratio."""
    return Verdict(
        ratio(max(loss_difference(run, other) for other in stock.values()), noise.loss),
        ratio(_max_or_nan([weight_difference(run, other) for other in stock.values()]), noise.weight),
        min(pearson(run, other) for other in stock.values()),
    )


def ratio(difference: float, noise: float) -> float:
    """`difference / noise`; 0 where both are zero, inf where the noise alone is."""
    if noise == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / noise


def _max_or_nan(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(v) for v in values) else max(values)
