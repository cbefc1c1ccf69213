"""`validate` finds a fault of a planned model and says in which module it lies."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin.core.dtensor import plan_transformer, validate
from tests.dtensor import faults
from tests.dtensor.models import Shape, make_batch, make_decoder
from tests.support import init_gloo, run_ranks

SHAPE = Shape(heads=8, key_heads=2, head_norms=True, experts=4, tied=True)


def locations(*, names: list[str], sequence_parallel: bool) -> dict[str, tuple[bool, str | None]]:
    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = plan_transformer(make_decoder(SHAPE), {"tp": 2}, sequence_parallel=sequence_parallel)
    found: dict[str, tuple[bool, str | None]] = {}
    for name in ["", *names]:
        fault: Any = getattr(faults, name) if name else None
        report = validate(lambda: make_decoder(SHAPE), plan, mesh, make_batch(SHAPE), after_apply=fault)
        found[name] = (report.is_equal, report.location)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_faults_are_found_and_located(sequence_parallel: bool) -> None:
    expected: dict[Any, Any] = faults.SEQUENCE if sequence_parallel else faults.WHOLE
    names = [fault.__name__ for fault in expected]
    found = run_ranks(2, locations, timeout=180.0, names=names, sequence_parallel=sequence_parallel)
    assert found[0].pop("") == (True, None)
    assert found[0] == {fault.__name__: (False, module) for fault, module in expected.items()}
