"""The loss scale moves as DeepSpeed's own does, and fp16 jobs follow stock ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plugin.deepspeed import versions
from hp_plugin.deepspeed.scaler import LossScale
from hp_plugin.errors import HyperParallelError
from tests.deepspeed import fp16_jobs
from tests.deepspeed.test_engine import CLIPPED, Job, both, relative
from tests.support import run_ranks


def fp16_on_cpu() -> bool:
    """Whether DeepSpeed itself trains in fp16 on this CPU."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


needs_fp16 = pytest.mark.skipif(not fp16_on_cpu(), reason="DeepSpeed refuses fp16 on this CPU")


@settings(max_examples=200, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    power=st.integers(0, 6),
)
def test_the_scale_moves_as_deepspeeds(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, power: int
) -> None:
    loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    stock = loss_scaler.DynamicLossScaler(
        init_scale=2**power,
        scale_window=window,
        min_scale=1,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    before, loss_scaler.dist.get_rank = loss_scaler.dist.get_rank, lambda: 1  # asks the rank only to print on 0
    try:
        ours = LossScale(
            float(2**power), window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, minimum=1.0
        )
        for overflow in overflows:
            ended = [raises(update, overflow) for update in (stock.update_scale, ours.update)]
            assert ended[0] == ended[1]
            if ended[0]:
                break
            for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
                assert getattr(ours, name) == getattr(stock, name), name
    finally:
        loss_scaler.dist.get_rank = before


def raises(update: Callable[[bool], None], overflow: bool) -> bool:
    try:
        update(overflow)
    except Exception:  # DeepSpeed raises no narrower class
        return True
    return False


def test_a_static_scale_stays() -> None:
    scale = LossScale(128.0, is_dynamic=False)
    for overflow in (True, True, False, True):
        scale.update(overflow)
    assert scale.cur_scale == 128.0


def test_an_overflow_at_the_smallest_scale_says_what_to_do() -> None:
    scale = LossScale(1.0, hysteresis=1)
    with pytest.raises(HyperParallelError, match='smallest loss scale, 1,.*use "bf16"'):
        scale.update(True)


@needs_fp16
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fp16", [{"loss_scale": 128.0}, {"initial_scale_power": 12, "loss_scale_window": 100}], ids=["static", "dynamic"]
)
def test_fp16_follows_stock_zero3(fp16: dict[str, Any]) -> None:
    block = {"enabled": True, **fp16}
    job = Job({"fp16": block, "gradient_accumulation_steps": 2, **CLIPPED}, build={"zero_init": True})
    stock, ours = both(job)
    for theirs, mine in zip(stock, ours):
        assert relative(mine.losses, theirs.losses) < 2e-3
        assert relative(mine.norms, theirs.norms) < 5e-3
        for name, expected in theirs.weights.items():
            assert float((mine.weights[name] - expected).norm() / expected.norm()) < 5e-3, name


@needs_fp16
@pytest.mark.timeout(400)
def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    for facts in run_ranks(2, fp16_jobs.overflow_on_one_rank, flavour="deepspeed", timeout=200):
        start, good, bad, later = (facts[name] for name in ("start", "good", "bad", "later"))
        assert (start["scale"], good["scale"], good["applied"], good["overflow"]) == (256.0, 256.0, True, False)
        assert (bad["scale"], bad["skipped"], bad["steps"]) == (128.0, 1, 2)
        assert bad["overflow"] and not bad["applied"] and facts["unchanged"]
        assert bad["rate"] == good["rate"] < later["rate"]  # the scheduler skips too
        assert (later["scale"], later["skipped"], later["steps"], later["overflow"]) == (256.0, 1, 5, False)
        assert facts["masters"]
        assert "smallest loss scale, 64" in facts["minimum"]


@needs_fp16
@pytest.mark.skipif((versions.deepspeed_version() or "").startswith("0.17"), reason="DeepSpeed 0.17 has no scale()")
@pytest.mark.full
@pytest.mark.timeout(400)
def test_backward_scales_by_every_way_in() -> None:
    for facts in run_ranks(2, fp16_jobs.backward_styles, flavour="deepspeed", timeout=200):
        assert facts["equal"]
        assert facts["norms"][0] == facts["norms"][1]
        assert "engine.scale(loss).backward()" in facts["refused"]


@needs_fp16
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_job_may_write_the_scale() -> None:
    assert run_ranks(2, fp16_jobs.written_scale, flavour="deepspeed", timeout=200) == [[1024.0, 2048.0]] * 2


@needs_fp16
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_checkpoint_continues_the_scale_on_another_number_of_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(flavour="deepspeed", timeout=200, directory=str(tmp_path))
    saved = run_ranks(2, fp16_jobs.save_and_continue, **options)[0]
    loaded = run_ranks(1, fp16_jobs.load_and_continue, **options)[0]
    assert loaded["state"] == saved["state"]
    assert loaded["state"]["cur_iter"] == 3 and loaded["state"]["last_overflow_iter"] == 2
    assert loaded["scales"] == saved["scales"]
    assert len(set(saved["scales"])) > 1
    for name, weight in saved["weights"].items():
        assert float((loaded["weights"][name] - weight).norm() / weight.norm()) < 1e-4, name


@needs_fp16
@pytest.mark.full
@pytest.mark.timeout(300)
def test_auto_cast_halves_inputs() -> None:
    (found,) = run_ranks(1, fp16_jobs.cast_inputs, flavour="deepspeed", timeout=100)
    assert found == {True: "torch.float16", False: "refused by torch"}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_fp16_is_refused_where_deepspeed_refuses_it() -> None:
    (said,) = run_ranks(1, fp16_jobs.initialize_in_fp16, flavour="deepspeed", timeout=100)
    assert said.startswith("UnsupportedError") and "cannot compute in fp16" in said
