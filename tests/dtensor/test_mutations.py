"""The mutation suite: every fault is found, and found in its module; a model without one gives no finding.

Two checkers are put to the test: `validate`, with a decoder of experts on data-, expert- and tensor-parallel ranks, and
`--hyperfsdp-mode validation`, with jobs of Megatron.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin.core.dtensor import plan_transformer, validate
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.dtensor.mutations import MUTATIONS
from tests.dtensor.test_experts import shard_over_the_rest
from tests.megatron.training import make_corpus
from tests.megatron.validation.faults import FAULTS
from tests.megatron.validation.validated import job_arguments, run_validated
from tests.support import init_gloo, run_ranks

SHAPE = Shape(experts=4, tied=True, key_heads=2)


def found_with(*, names: list[str]) -> dict[str, tuple[bool, str | None, list[str], str]]:
    """For each fault: whether all is equal, the module that is named, the kinds that differ there, and the report."""
    init_gloo()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
    axes = {"ep": 2, "tp": 2}
    plans = {
        divided: plan_transformer(
            make_decoder(SHAPE), axes, sequence_parallel=divided, loss_parallel=True, expert_axis="ep"
        )
        for divided in (True, False)
    }
    results: dict[str, tuple[bool, str | None, list[str], str]] = {}
    for name in ["", *names]:
        step = torch.optim.SGD.step
        report = validate(
            lambda: make_decoder(SHAPE),
            plans[not name or MUTATIONS[name].sequence_parallel],
            mesh,
            make_batch(SHAPE),
            data_parallel=lambda model: shard_over_the_rest(model, mesh),
            dtype=torch.float64,
            after_apply=MUTATIONS[name].put if name else None,
        )
        torch.optim.SGD.step = step  # type: ignore[method-assign]
        kinds = sorted({str(c.kind) for c in report.findings})
        results[name] = (report.is_equal, report.location, kinds, str(report))
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return dict(run_ranks(4, found_with, timeout=240.0, names=list(MUTATIONS))[0])


@pytest.mark.full
def test_the_model_itself_gives_no_finding(results: dict[str, Any]) -> None:
    is_equal, _, _, report = results[""]
    assert is_equal, report


@pytest.mark.full
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found_in_its_module(name: str, results: dict[str, Any]) -> None:
    is_equal, location, kinds, report = results[name]
    print(report)
    assert not is_equal
    mutation = MUTATIONS[name]
    assert mutation.kind in kinds
    _assert_located(location, mutation.module, report)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    return make_corpus(tmp_path_factory.mktemp("corpus"))


_SMALL = ("output-unreduced", "divisor")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _SMALL else pytest.mark.full) for n in FAULTS])
def test_a_mutation_of_a_megatron_job_is_found_in_its_module(name: str, corpus: list[str]) -> None:
    mutation = FAULTS[name]
    found = run_validated(4, job_arguments(corpus, mutation.job), fault=name)
    assert all(rank["status"] == 1 for rank in found)
    report = found[0]["reports"][-1]
    print(report["text"])
    wrong = {c["kind"] for c in report["comparisons"] if not c["error"] <= c["tolerance"]}
    assert mutation.kind in wrong
    _assert_located(report["location"], mutation.module, report["text"])


def _assert_located(location: str | None, module: str | None, report: str) -> None:
    """In the module, or inside it; "" is no module but what is around all of them."""
    if module is not None:
        assert location is not None, report
        assert location == module or (module and location.startswith(f"{module}.")), report


def test_there_are_enough_mutations_and_no_two_are_alike() -> None:
    from tests.dtensor import faults

    names = [*MUTATIONS, *FAULTS, *(fault.__name__ for fault in (*faults.WHOLE, *faults.SEQUENCE))]
    assert len(set(names)) == len(names) >= 40
