"""Faults put into planned models are found, and located to module and operation: in one process and in several."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin.core.dtensor import apply_plan, loss_function, plan_transformer, simulate
from hp_plugin.core.dtensor.validation import Finding, PlacementError, report_of
from tests.dtensor import faults
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPE = Shape(heads=8, key_heads=2, head_norms=True, experts=4, tied=True)

# Fault -> module, operation, kind, expected, found. Modules are inner ones, where the plan's entry is of an outer one.
EXPECTED: dict[Any, tuple[str, str, str, str, str]] = {
    faults.output_sum_is_missing: ("layers.1.mlp", "boundary", "output", "replicate", "partial"),
    faults.output_sum_is_doubled: ("layers.0.attention", "boundary", "output", "replicate", "none"),
    faults.output_is_averaged: ("layers.1.attention", "boundary", "output", "replicate", "partial"),
    faults.input_gradient_is_not_summed: ("layers.1.attention", "boundary", "input", "replicate", "partial"),
    faults.router_gradient_is_not_summed: ("layers.0.mlp.router", "boundary", "parameter", "replicate", "partial"),
    faults.head_norm_gradient_is_not_summed: (
        "layers.0.attention.q_norm",
        "boundary",
        "parameter",
        "replicate",
        "partial",
    ),
    faults.bias_is_added_by_every_rank: ("layers.1.attention.wo", "boundary", "parameter", "partial", "replicate"),
    faults.shards_are_swapped: ("layers.0.attention.wv", "parameters", "parameter", "shard(0)", "none"),
    faults.lookup_ignores_the_offset: ("tokens", "region", "output", "replicate", "none"),
}
SEQUENCE: dict[Any, tuple[str, str, str, str, str]] = {
    faults.norm_gradient_is_not_summed: ("layers.0.norm2", "boundary", "parameter", "replicate", "partial"),
    faults.final_norm_gradient_is_not_summed: ("norm", "boundary", "parameter", "replicate", "partial"),
}


def test_every_fault_has_an_expectation() -> None:
    assert EXPECTED.keys() == faults.WHOLE.keys()
    assert SEQUENCE.keys() == faults.SEQUENCE.keys()


def summary(finding: Finding) -> tuple[str, str, str, str, str]:
    def placement(text: str) -> str:
        return text.removeprefix("tp: ")

    return finding.module, finding.op, finding.kind, placement(finding.expected), placement(finding.found)


@pytest.mark.parametrize("fault", [*EXPECTED, *SEQUENCE], ids=lambda f: f.__name__)
def test_simulated_ranks_find_and_locate(fault: Any) -> None:
    plan = plan_transformer(make_decoder(SHAPE), {"tp": 2}, sequence_parallel=fault in SEQUENCE)
    report = simulate(lambda: make_decoder(SHAPE), plan, make_batch(SHAPE), after_apply=fault, timeout_s=60.0)
    [finding] = report.findings
    assert summary(finding) == (EXPECTED | SEQUENCE)[fault]
    assert finding.axis == "tp"
    # The message names everything, and the first wrong element by its place in the whole tensor.
    assert finding.index is not None
    assert finding.expected_value != finding.found_value
    for part in (finding.module, finding.op, "tp", finding.expected, str(list(finding.index))):
        assert part in str(finding)
    with pytest.raises(PlacementError, match="axis tp"):
        report.raise_if_different()


def follow_in_processes(*, shape: Shape, names: list[str], sequence_parallel: bool) -> dict[str, Any]:
    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids, targets = make_batch(shape)
    found: dict[str, Any] = {}
    for name in ["", *names]:
        model = make_decoder(shape)
        plan = plan_transformer(model, {"tp": 2}, sequence_parallel=sequence_parallel)
        apply_plan(model, plan, mesh, mode="validation")
        if name:
            getattr(faults, name)(model)
        try:
            loss = loss_function(model)(model(ids), targets)
            loss.backward()
            found[name] = [(o.module, o.op, o.how, o.placements) for o in report_of(model).operations]
        except PlacementError:
            [found[name]] = report_of(model).findings
    return found


def check_processes(shape: Shape, names: list[str], *, sequence_parallel: bool) -> None:
    ranks = run_ranks(
        2,
        follow_in_processes,
        timeout=240.0,
        shape=shape,
        names=names,
        sequence_parallel=sequence_parallel,
    )
    assert ranks[0] == ranks[1]
    plan = plan_transformer(make_decoder(shape), {"tp": 2}, sequence_parallel=sequence_parallel)
    for name in ["", *names]:
        fault: Any = getattr(faults, name) if name else None
        report = simulate(lambda: make_decoder(shape), plan, make_batch(shape), after_apply=fault)
        if name:
            assert report.findings == (ranks[0][name],)
        else:
            assert [(o.module, o.op, o.how, o.placements) for o in report.operations] == ranks[0][name]


def test_processes_give_the_same_verdicts_as_simulated_ranks() -> None:
    names = ["output_sum_is_doubled", "norm_gradient_is_not_summed"]
    check_processes(Shape(bias=False), names, sequence_parallel=True)


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_processes_give_the_same_verdict_for_every_fault(sequence_parallel: bool) -> None:
    expected = SEQUENCE if sequence_parallel else EXPECTED
    check_processes(SHAPE, [fault.__name__ for fault in expected], sequence_parallel=sequence_parallel)
