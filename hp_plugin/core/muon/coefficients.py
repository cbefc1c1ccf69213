"""Coefficient sets of the Newton-Schulz iteration, as data.

One step maps every singular value x of a matrix to ``a x + b x^3 + c x^5``; a set is the list of its (a, b, c). Sets
are compositions: a set of five steps is not the first five steps of a set of eight. How many steps a set has is
therefore part of it, and asking for another number is an error instead of another polynomial than was meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from hp_plugin.errors import ConfigurationError

Coefficients = tuple[float, float, float]
"""(a, b, c) of one step."""

_CLASSIC: Coefficients = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class CoefficientSet:
    """One published set.

    Attributes:
        name: Its name here.
        steps: (a, b, c) of each step, in order, as published.
        source: Where the numbers are from.
        repeats: What a number of steps beyond the published ones means. "all": the set is one step, taken any number of
            times. "last": the last step is taken again. "none": there is no such thing.
        default_steps: Steps when the caller names no number.
        safety: The published iteration divides the matrix by this times its norm, to stay below 1 under rounding.
    """

    name: str
    steps: tuple[Coefficients, ...]
    source: str
    repeats: Literal["all", "last", "none"]
    default_steps: int
    safety: float = 1.0

    def take(self, steps: int | None = None) -> tuple[Coefficients, ...]:
        """The (a, b, c) of `steps` steps, with the safety factor worked into the first.

        Dividing the matrix by `safety` before the first step is the same as dividing a, b and c of that step by
        safety, safety^3 and safety^5, so that the iteration itself knows nothing of it.

        Args:
            steps: Number of steps. None: as many as is usual for the set.

        Raises:
            ConfigurationError: The set has no such number of steps.
        """
        count = self.default_steps if steps is None else _checked_steps(steps)
        own = len(self.steps)
        if not self.has(count):
            has = f"{own} steps or more (the last one repeats)" if self.repeats == "last" else f"exactly {own} steps"
            others = ", ".join(repr(other.name) for other in SETS.values() if other.has(count))
            raise ConfigurationError(
                f"coefficient set {self.name!r} has {has} and {count} were asked for. Its steps are one composed "
                f"polynomial, of which a part is another polynomial: ask for {own} steps (or leave steps out), take a "
                f"set that has {count} ({others}), or give the (a, b, c) of every step yourself"
            )
        taken = self.steps + self.steps[-1:] * (count - own)
        a, b, c = taken[0]
        first = (a / self.safety, b / self.safety**3, c / self.safety**5)
        return (first, *taken[1:])

    def has(self, steps: int) -> bool:
        """Whether the set has so many steps."""
        return steps == len(self.steps) or (steps > len(self.steps) and self.repeats != "none")


_POLAR_EXPRESS_8: tuple[Coefficients, ...] = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)

SETS: Mapping[str, CoefficientSet] = MappingProxyType(
    {
        item.name: item
        for item in (
            CoefficientSet(
                "classic",
                (_CLASSIC,),
                "Keller Jordan, https://kellerjordan.github.io/posts/muon/; torch.optim.Muon; DeepSpeed",
                repeats="all",
                default_steps=5,
            ),
            CoefficientSet(
                "quintic5",
                (
                    (4.0848, -6.8946, 2.9270),
                    (3.9505, -6.3029, 2.6377),
                    (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046),
                    (2.8366, -3.0525, 1.2012),
                ),
                "https://leloykun.github.io/ponder/muon-opt-coeffs/; Emerging-Optimizers 'quintic'",
                repeats="none",
                default_steps=5,
            ),
            CoefficientSet(
                "polar_express5",
                (
                    (8.156554524902461, -22.48329292557795, 15.878769915207462),
                    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
                ),
                "Polar Express, arXiv 2505.16932, for five steps; modded-nanogpt; dion/polar_express.py",
                repeats="none",
                default_steps=5,
                safety=1.02,
            ),
            CoefficientSet(
                "polar_express8",
                _POLAR_EXPRESS_8,
                "Polar Express, arXiv 2505.16932, its factor 1.01 inside; Emerging-Optimizers 'polar_express'",
                repeats="last",
                default_steps=8,
            ),
            CoefficientSet(
                "polar_express8_first5",
                _POLAR_EXPRESS_8[:5],
                "What Emerging-Optimizers runs for 'polar_express' with 5 steps, Megatron-LM's default number",
                repeats="none",
                default_steps=5,
            ),
            CoefficientSet(
                "two_phase",
                (_CLASSIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
                "DeepSeek-V4 report; Emerging-Optimizers 'deepseekv4'",
                repeats="last",
                default_steps=10,
            ),
        )
    }
)
"""The sets by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "keller:newton_schulz": "classic",
        "torch:default": "classic",
        "deepspeed:standard": "classic",
        "deepspeed:gram": "classic",
        "megatron:simple": "classic",
        "megatron:quintic": "quintic5",
        "megatron:polar_express": "polar_express8",
        "megatron:deepseekv4": "two_phase",
        "dion:newton_schulz": "quintic5",
        "dion:polar_express": "polar_express5",
        "modded_nanogpt:polar_express": "polar_express5",
    }
)
"""Names that a set has in a library, as "library:name". "megatron" stands for Emerging-Optimizers too."""

_AMBIGUOUS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "quintic": ("classic", "quintic5"),
        "polar_express": ("polar_express5", "polar_express8", "polar_express8_first5"),
    }
)


def coefficient_set(name: str) -> CoefficientSet:
    """The set of a name, or of a name in another library ("megatron:quintic").

    Raises:
        ConfigurationError: No set has that name, or several libraries mean different sets by it.
    """
    found = SETS.get(ALIASES.get(name, name))
    if found is not None:
        return found
    if name in _AMBIGUOUS:
        raise ConfigurationError(
            f"coefficients={name!r} means different sets in different libraries: say which of "
            f"{', '.join(map(repr, _AMBIGUOUS[name]))}"
        )
    raise ConfigurationError(
        f"there is no coefficient set {name!r}. The sets are {', '.join(map(repr, SETS))}, and by their names in other "
        f"libraries {', '.join(map(repr, ALIASES))}; or give (a, b, c), or one (a, b, c) per step"
    )


def resolve_coefficients(
    coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int | None = None
) -> tuple[Coefficients, ...]:
    """The (a, b, c) of every step that will run.

    Args:
        coefficients: The name of a set; or one (a, b, c), taken `steps` times; or one (a, b, c) per step.
        steps: Number of steps. None: what the set has (5 for one (a, b, c)). With one (a, b, c) per step it may be left
            out and must otherwise be their number.

    Returns:
        One (a, b, c) per step; its length is the number of steps.

    Raises:
        ConfigurationError: An unknown name, numbers that are not triples of finite floats, or a number of steps that
            the set has not.
    """
    if isinstance(coefficients, str):
        return coefficient_set(coefficients).take(steps)
    if len(coefficients) == 3 and all(isinstance(value, (int, float)) for value in coefficients):
        count = 5 if steps is None else _checked_steps(steps)
        return (_triple(cast("Sequence[float]", coefficients)),) * count
    given = tuple(_triple(item) for item in coefficients)
    if not given:
        raise ConfigurationError("coefficients is empty: give the name of a set, (a, b, c), or one (a, b, c) per step")
    if steps is not None and _checked_steps(steps) != len(given):
        raise ConfigurationError(
            f"coefficients gives {len(given)} steps and steps={steps}: leave steps out, or give one (a, b, c) per step"
        )
    return given


def _triple(item: object) -> Coefficients:
    values = tuple(item) if isinstance(item, Sequence) and not isinstance(item, str) else ()
    if len(values) != 3 or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ConfigurationError(f"a Newton-Schulz step has three finite coefficients (a, b, c), not {item!r}")
    a, b, c = map(float, values)
    return a, b, c


def _checked_steps(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ConfigurationError(f"steps={steps!r}: the number of Newton-Schulz steps is a whole number from 1 to 99")
    return steps
