"""Jobs change engine and world at a checkpoint, and go on as stock DeepSpeed does without a break.

The oracle is the engine that saved: it trains on without an interruption. Losses are equal on any world, since all
ranks see the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed import convert_jobs
from tests.deepspeed.convert_jobs import MORE, STEPS
from tests.deepspeed.training import Run
from tests.support import run_ranks

ENGINES = ("zero1", "zero2", "zero3", "ours")
WORLDS = (2, 3, 4)
TIME_LIMIT_S = 200


def run(ranks: int, function: Any, **arguments: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="deepspeed", timeout=TIME_LIMIT_S, **arguments)


def assert_goes_on(found: Run, expected: Run, *, tolerance: float = 2e-6) -> None:
    assert len(found.losses) == len(expected.losses) == MORE
    for a, b in [(found.losses, expected.losses), (found.norms, expected.norms)]:
        assert max(abs(x - y) / abs(y) for x, y in zip(a, b)) < tolerance
    assert found.rates == expected.rates
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).norm() / weight.norm()) < tolerance, name


def assert_loaded(facts: dict[str, Any]) -> None:
    assert facts["steps"] == STEPS
    assert facts["client"]["epoch"] == 7 and torch.equal(facts["client"]["seen"], torch.tensor([STEPS]))
    assert "module" not in facts["client"]
    assert torch.equal(facts["buffer"], torch.tensor([1.5, 2.0]))


def check(directory: Path, saver: str, ranks: int, worlds: tuple[int, ...]) -> None:
    place = str(directory)
    saved = run(ranks, convert_jobs.save_and_go_on, directory=place, engine=saver)
    assert saved[0].engine == ("HyperFSDPEngine" if saver == "ours" else "DeepSpeedEngine")
    for world in worlds:
        for found, facts in run(
            world, convert_jobs.load_and_go_on, directory=place, engine="ours", supernode_size=1 + (world == 4)
        ):
            assert found.engine == "HyperFSDPEngine"
            assert_loaded(facts)
            assert_goes_on(found, saved[0])


@pytest.mark.timeout(600)
def test_ours_goes_on_from_zero_3_on_another_number_of_ranks(tmp_path: Path) -> None:
    check(tmp_path, "zero3", 2, (3,))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("saver", ENGINES)
def test_ours_goes_on_from_every_engine_on_every_number_of_ranks(tmp_path: Path, saver: str, ranks: int) -> None:
    check(tmp_path, saver, ranks, WORLDS)
