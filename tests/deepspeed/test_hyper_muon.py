"""HyperMuon from the JSON is that of one process, whatever the mesh, and clips gradients before they are used."""

from __future__ import annotations

import pytest

from tests.deepspeed import helpers
from tests.support import run_ranks


@pytest.mark.full
@pytest.mark.timeout(600)
def test_muon_on_a_mesh_equals_muon_on_one_process() -> None:
    alone = run_ranks(1, helpers.train_with_muon, flavour="deepspeed", timeout=200, supernode_size=1, ranks_of_data=2)
    for supernode_size in (1, 2):
        both = run_ranks(
            2,
            helpers.train_with_muon,
            flavour="deepspeed",
            timeout=200,
            supernode_size=supernode_size,
            ranks_of_data=2,
        )
        assert min(alone[0].norms) > 0.1, "clipping must take part"
        assert both[0].losses == pytest.approx(alone[0].losses, rel=1e-5)
        assert both[0].norms == pytest.approx(alone[0].norms, rel=1e-4)
        for name, weight in alone[0].weights.items():
            assert float((both[0].weights[name] - weight).norm() / weight.norm()) < 1e-4, name


@pytest.mark.full
@pytest.mark.timeout(400)
def test_one_rate_for_both_halves_and_groups_of_others_are_refused() -> None:
    found = run_ranks(2, helpers.muon_refusals, flavour="deepspeed", timeout=200)[0]
    assert "give a list of 2" in found["scheduler"]
    assert "weight_decay" in found["groups"] and "makes its groups itself" in found["groups"]
    assert found["rates"] == "[0.02, 0.003]"
