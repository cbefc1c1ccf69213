"""Kernels compile for devices that are not there; `make test-kernels` compiles all of them, and for Ascend too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compile_kernels.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """The tool, or a program that imports it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program] if program else [sys.executable, str(TOOL), *arguments]
    environment["PYTHONPATH"] = str(TOOL.parent)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@needs_triton
def test_a_kernel_becomes_a_cubin_for_every_architecture() -> None:
    result = run("cuda", "--only", "scale_kernel.fp32-bf16.accumulate1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "compile_kernels cuda: 3 passed, 0 failed" in result.stdout


TOO_LARGE = """
import dataclasses, compile_kernels
load = compile_kernels.load
def larger(name):
    module = load(name)
    if name == "variants":
        tile = module.Tile({"BLOCK": 128, "BLOCK_K": 128}, num_warps=8, num_stages=5)
        module.product_tile = lambda platform, dtype: tile
    return module
compile_kernels.load = larger
raise SystemExit(compile_kernels.compile_all("cuda", "symmetric_product_kernel.fp16-fp16-fp16-fp16.has_add0"))
"""


@needs_triton
def test_a_tile_that_needs_too_much_shared_memory_is_reported() -> None:
    result = run(program=TOO_LARGE)
    assert result.returncode > 0, result.stdout + result.stderr
    assert "bytes of shared memory, a block may have 166912" in result.stdout


def test_a_name_that_fits_nothing_is_an_error() -> None:
    result = run("cuda", "--only", "no such kernel")
    assert result.returncode == 1
    assert "no variant has 'no such kernel' in its name" in result.stdout
