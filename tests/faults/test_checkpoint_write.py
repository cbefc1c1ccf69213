"""A checkpoint that cannot be written is an error on every rank, and leaves what was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import cases
from tests.support import run_ranks


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_full_disk_keeps_the_earlier_checkpoint(failing_rank: int, tmp_path: Path) -> None:
    results = run_ranks(2, cases.save_on_full_disk, directory=str(tmp_path), failing_rank=failing_rank, first=False)
    for result in results:
        assert "was not written" in result["error"]
        assert result["names"] == ["checkpoint"]
        assert result["unharmed"]


def test_full_disk_at_the_first_save_leaves_nothing(tmp_path: Path) -> None:
    results = run_ranks(2, cases.save_on_full_disk, directory=str(tmp_path), failing_rank=1, first=True)
    for result in results:
        assert "was not written" in result["error"]
        assert result["names"] == []
