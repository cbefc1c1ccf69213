"""Experts of `deepspeed.moe` in checkpoints of ZeRO, which has them in stages 1 and 2 only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hp_plugin.convert import convert, open_checkpoint
from tests.deepspeed import moe_jobs
from tests.deepspeed.training import Run
from tests.support import run_ranks


def merged(runs: list[Run]) -> dict[str, torch.Tensor]:
    return {name: weight for run in runs for name, weight in run.weights.items()}


def relative(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "ranks", "ep_sizes"), [(1, 2, [2, 2]), (2, 2, [2, 1]), (2, 4, [2, 4])])
def test_experts_of_zero_load_at_any_ep_size(tmp_path: Path, stage: int, ranks: int, ep_sizes: list[int]) -> None:
    options: dict[str, Any] = dict(flavour="deepspeed", timeout=200, directory=str(tmp_path))
    saved = run_ranks(ranks, moe_jobs.save_stock, stage=stage, ep_sizes=ep_sizes, **options)
    assert saved[0].engine == "DeepSpeedEngine"
    weights = merged(saved)
    found = open_checkpoint(tmp_path / "global_step2")
    assert found.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found.weights[name].read(), weight), name
    report = convert(tmp_path, tmp_path / "model", to="safetensors", verify=True)
    assert report.verified == len(weights)
    for world, sizes in [(1, [1, 1]), (2, [1, 2]), (4, [4, 2])]:
        loaded = run_ranks(world, moe_jobs.load, ep_sizes=sizes, **options)
        assert all(torch.equal(merged(loaded)[name], weight) for name, weight in weights.items())
        for each in loaded:
            assert relative(each.losses, saved[0].losses) < 2e-6
            assert relative(each.norms, saved[0].norms) < 2e-6
