"""The recorded schedule is the documented one, alike on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fsdp import recorded
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedule.md"


def documented() -> str:
    text = DOCUMENT.read_text()
    return text.partition("<!-- schedule -->")[2].partition("<!-- end of schedule -->")[0].strip()


def test_the_schedule_of_a_run_is_the_table_of_the_documentation() -> None:
    tables = run_ranks(4, recorded.record, replicate=2, shard=2)
    assert tables == [tables[0]] * 4
    print(tables[0])
    assert tables[0] == documented()


def test_reductions_follow_the_units_in_backward_and_share_buckets() -> None:
    rows = [row.strip("| ").split(" | ") for row in documented().splitlines()[2:]]
    text = [" ".join(cell for cell in row if cell.strip()) for row in rows]
    for earlier, later in (
        ("backward layers.2", "reduce-scatter layers.2"),
        ("reduce-scatter layers.2", "all-reduce head + layers.2"),
        ("all-reduce head + layers.2", "backward layers.1"),
        ("all-reduce layers.1 + layers.0", "backward embedding"),
        ("all-reduce embedding", "wait for every all-reduce"),
    ):
        assert text.index(earlier) < text.index(later), (earlier, later)


def test_a_trace_names_each_unit_that_is_gathered_waited_for_and_reduced() -> None:
    ranges, *others = run_ranks(4, recorded.profiler_ranges, replicate=2, shard=2)
    for unit in ("embedding", "layers.0", "layers.1", "layers.2", "head"):
        assert ranges[f"hyperfsdp reduce-scatter {unit}"] == 1
        assert ranges[f"hyperfsdp all-gather {unit}"] == 2, (unit, ranges)
        assert ranges[f"hyperfsdp wait for all-gather of {unit}"] == 2, (unit, ranges)
    assert ranges["hyperfsdp wait for end_of_backward"] == 1
    assert {name for name in ranges if "wait for" not in name} == {
        name for each in others for name in each if "wait for" not in name
    }
