"""Code that reads and writes full values of ZeRO-3 parameters works on ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deepspeed import helpers
from tests.support import run_ranks


@pytest.mark.parametrize(("ranks", "supernode_size"), [pytest.param(2, 2), pytest.param(3, 1, marks=pytest.mark.full)])
@pytest.mark.timeout(400)
def test_full_values_can_be_read_and_written(ranks: int, supernode_size: int) -> None:
    run_ranks(
        ranks,
        helpers.read_and_write_full_values,
        flavour="deepspeed",
        timeout=200,
        supernode_size=supernode_size,
    )


@pytest.mark.parametrize(("ranks", "supernode_size"), [pytest.param(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
@pytest.mark.timeout(400)
def test_a_ranks_own_part_can_be_read_and_written(ranks: int, supernode_size: int) -> None:
    run_ranks(
        ranks,
        helpers.read_and_write_local_parts,
        flavour="deepspeed",
        timeout=200,
        supernode_size=supernode_size,
    )


@pytest.mark.full
@pytest.mark.timeout(400)
def test_full_16bit_weights_are_written_where_the_configuration_allows_it(tmp_path: Path) -> None:
    written = run_ranks(2, helpers.save_16bit, flavour="deepspeed", timeout=200, directory=str(tmp_path))
    assert written == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights.bin"]
