"""A job hears of CUDA_DEVICE_MAX_CONNECTIONS where it costs overlap, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_plugin.megatron.connections import VARIABLE, connections_line


def arguments(**sizes: int) -> Any:
    return SimpleNamespace(**{"tensor_model_parallel_size": 1, "context_parallel_size": 1, **sizes})


def test_one_connection_that_nothing_needs_is_to_be_unset() -> None:
    line = connections_line(arguments(), {VARIABLE: "1"}, device="cuda")
    assert line is not None and line.startswith(f"{VARIABLE} is 1") and "unset the variable" in line


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size needs"),
        ({"context_parallel_size": 2}, "--context-parallel-size needs"),
    ],
)
def test_one_connection_that_megatron_needs_is_explained(sizes: dict[str, int], flag: str) -> None:
    line = connections_line(arguments(**sizes), {VARIABLE: "1"}, device="cuda")
    assert line is not None and flag in line and "unset" not in line


@pytest.mark.parametrize(
    ("environment", "device"),
    [({VARIABLE: "8"}, "cuda"), ({}, "cuda"), ({VARIABLE: "1"}, "npu"), ({VARIABLE: "1"}, "cpu")],
)
def test_nothing_is_said_where_it_does_not_matter(environment: dict[str, str], device: str) -> None:
    assert connections_line(arguments(), environment, device=device) is None
