"""What DeepSpeed measures and logs is true of our engine, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deepspeed import helpers, training
from tests.support import run_ranks


@pytest.mark.full
@pytest.mark.timeout(400)
def test_monitors_timers_profiler_and_loggers_see_the_job(tmp_path: Path) -> None:
    facts = run_ranks(2, helpers.observe, flavour="deepspeed", timeout=200, directory=str(tmp_path))
    plain = run_ranks(2, training.train, flavour="deepspeed", timeout=200, config=training.base_config(), steps=3)
    for found, expected in zip(facts, plain):
        assert found["run"].losses == pytest.approx(expected.losses, rel=2e-6)
        assert found["run"].norms == pytest.approx(expected.norms, rel=2e-6)
        assert found["logged"]["hyperfsdp all_reduce"] == found["counted"] > 0
        reduce, backward = found["timers"]["bwd_allreduce_microstep"], found["timers"]["bwd_microstep"]
        assert 0.0 < reduce < backward
    assert facts[0]["profile"]
    assert any("lr" in name for name in facts[0]["monitored"])
