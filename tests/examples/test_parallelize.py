"""`examples/parallelize.py`: tensor parallelism, FSDP and replication by submeshes, equal to one process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import EXAMPLES
from tests.support import init_gloo, run_ranks


def example() -> Any:
    import sys

    if str(EXAMPLES) not in sys.path:  # on a rank
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("parallelize")


def compare(*, steps: int, **degrees: Any) -> tuple[list[float], list[float]]:
    init_gloo()
    module = example()
    result: tuple[list[float], list[float]] = module.compare(module.ParallelConfig(**degrees), steps)
    return result


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (4, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}),
        pytest.param(4, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, marks=pytest.mark.full),
        pytest.param(2, {"sequence_parallel": False}, marks=pytest.mark.full),
        pytest.param(8, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, marks=pytest.mark.full),
    ],
    ids=["tp2_shard2", "tp2_replicate2", "shard2", "tp2_shard2_replicate2"],
)
def test_losses_equal_those_of_one_process(ranks: int, degrees: dict[str, Any]) -> None:
    for found, expected in run_ranks(ranks, compare, timeout=280.0, steps=4, **degrees):
        assert expected[-1] < expected[0], "the data are learnt, so that a wrong step would show"
        assert found == pytest.approx(expected, rel=example().TOLERANCE)


def test_degrees_are_read_from_the_parallelism_block(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("parallelism:\n  tensor_parallel_degree: 2\n  data_parallel_replicate_degree: 2\n")
    config = example().ParallelConfig.read(str(file))
    assert (config.tensor_parallel_degree, config.data_parallel_replicate_degree) == (2, 2)
    assert config.data_parallel_shard_degree == -1
