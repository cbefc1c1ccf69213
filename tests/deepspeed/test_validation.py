"""`"mode": "validation"`: jobs that are right equal their unsharded model and go on; faults are found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed import training, validated
from tests.support import run_ranks

TIME_LIMIT_S = 200.0
_FULL = pytest.mark.full

CLEAN: list[Any] = [
    pytest.param(2, {"gradient_clipping": 0.5}, {}, id="clipped"),
    pytest.param(4, {"gradient_accumulation_steps": 3}, {}, id="accumulated", marks=_FULL),
    pytest.param(2, {"gradient_accumulation_steps": 2}, {"style": "no_sync"}, id="no-sync", marks=_FULL),
    pytest.param(2, {}, {"style": "direct"}, id="loss-backward", marks=_FULL),
    pytest.param(2, {"bf16": {"enabled": True}}, {}, id="bf16", marks=_FULL),
    pytest.param(2, {}, {"client": "groups"}, id="client-optimizer", marks=_FULL),
    pytest.param(2, {}, {"model": {"tied": True}}, id="tied", marks=_FULL),
    pytest.param(1, {}, {}, id="one-rank", marks=_FULL),
]


def _config(**more: Any) -> dict[str, Any]:
    return training.base_config(hyperfsdp={"supernode_size": 1, "mode": "validation", "validation_steps": 3}, **more)


@pytest.mark.parametrize(("ranks", "config", "options"), CLEAN)
def test_a_job_that_is_right_is_equal_and_goes_on_as_without(
    ranks: int, config: dict[str, Any], options: dict[str, Any]
) -> None:
    found = run_ranks(
        ranks, validated.train, flavour="deepspeed", timeout=TIME_LIMIT_S, config=_config(**config), **options
    )
    plain = run_ranks(
        ranks,
        training.train,
        flavour="deepspeed",
        timeout=TIME_LIMIT_S,
        config=training.base_config(**config),
        **options,
    )
    for (run, refused, reports), without in zip(found, plain, strict=True):
        assert not refused
        assert len(reports) == 3
        for report in reports:
            assert report["equal"]
            assert {c["kind"] for c in report["comparisons"]} == {"output", "gradient", "weight", "grad_norm"}
        assert run.losses == pytest.approx(without.losses, rel=2e-6)
        assert run.norms == pytest.approx(without.norms, rel=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind", "module"),
    [
        ("divided_by_another_number", "gradient", ""),
        ("one_layer_counts_twice", "gradient", "blocks.1"),
        ("a_micro_batch_is_dropped", "gradient", None),
        ("one_copy_differs", "output", None),
        ("one_shard_is_not_updated", "weight", None),
    ],
)
def test_a_fault_ends_the_job_with_a_report(fault: str, kind: str, module: str | None) -> None:
    found = run_ranks(2, validated.train, flavour="deepspeed", timeout=TIME_LIMIT_S, config=_config(), fault=fault)
    for run, refused, reports in found:
        print(refused)
        assert run is None
        assert refused.startswith("ValidationError")
        wrong = [c for c in reports[-1]["comparisons"] if not c["error"] <= c["tolerance"]]
        assert kind in {c["kind"] for c in wrong}
        if module is not None:
            assert f"{reports[-1]['location']}.".startswith(f"{module}." if module else ".")


@pytest.mark.full
def test_what_cannot_be_compared_is_refused_by_name() -> None:
    found = run_ranks(2, validated.train, flavour="deepspeed", timeout=TIME_LIMIT_S, config=_config(), zero_init=True)
    assert all("zero.Init" in refused for _, refused, _ in found)
