"""The list of kernels says which implementation serves, and why, with the library and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hp_plugin.core.kernels import choices, native

TENSOR_OPERATIONS = {"accumulate_scaled_", "scale_copy_", "sum_in_order_"}


def test_every_operation_is_listed_as_native_where_the_library_is(
    native_library: native.NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = native.NativeStatus(native_library, "The native library was loaded.")
    monkeypatch.setattr(choices, "native_status", lambda: found)
    everything = [choice for choice in choices.chosen_kernels() if choice.device_type in ("cpu", "other")]
    listed = {(choice.operation, choice.device_type): choice for choice in everything}
    assert {operation for operation, _ in listed} == TENSOR_OPERATIONS | {choices.COUNTERS}
    for operation in TENSOR_OPERATIONS:
        assert listed[operation, "cpu"].implementation == "native"
        assert native_library.build_info in listed[operation, "cpu"].reason
        assert listed[operation, "other"].implementation == "torch"
    assert listed[choices.COUNTERS, "cpu"].implementation == "native"
    assert (choices.COUNTERS, "other") not in listed


def test_without_the_library_torch_serves_and_the_counters_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = native.NativeStatus(None, "The native library is not installed.")
    monkeypatch.setattr(choices, "native_status", lambda: absent)
    on_cpu = {choice.operation: choice for choice in choices.chosen_kernels() if choice.device_type == "cpu"}
    assert {on_cpu[operation].implementation for operation in TENSOR_OPERATIONS} == {"torch"}
    assert on_cpu[choices.COUNTERS].implementation == "none"
    assert "torch.distributed" in on_cpu[choices.COUNTERS].applies_to
    assert {choice.reason for choice in on_cpu.values()} == {absent.reason}


WITHOUT_LIBRARY = """
import ctypes, json, sys
import torch
load = ctypes.CDLL
def refuse(name, *args, **kwargs):
    assert "hp_native" not in str(name), "the library was loaded"
    return load(name, *args, **kwargs)
ctypes.CDLL = refuse
from hp_plugin.core import kernels
wide, narrow = torch.ones(9), torch.ones(9, dtype=torch.bfloat16)
kernels.accumulate_scaled_(wide, narrow, 2.0)
kernels.scale_copy_(narrow, wide, 2.0)
total = torch.empty(9)
kernels.sum_in_order_(total, [wide, wide], 0.5)
from hp_plugin.cli.doctor import examine
report = examine()
values = [wide[0].item(), narrow[0].item(), total[0].item()]
print(json.dumps([values, report.native_library, report.kernels, report.problems]))
"""


def test_a_process_with_the_library_switched_off_computes_with_torch_and_the_doctor_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY],
        env={**os.environ, native.OVERRIDE_VARIABLE: "none"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    values, sentence, kernels, problems = json.loads(result.stdout.splitlines()[-1])
    assert values == [3.0, 6.0, 3.0]
    assert "switched off by HP_NATIVE_LIBRARY=none" in sentence
    assert not [problem for problem in problems if "library" in problem]
    assert {kernel["implementation"] for kernel in kernels} == {"torch", "none"}
