"""The Triton kernels in Triton's interpreter, on tensors of the CPU.

Triton must be told before it is first imported, so these tests have a process of their own: `tests/kernels/
test_interpreted.py` starts one for the quick ones, `make test-kernels` for all. Elsewhere they are not collected.
"""

from __future__ import annotations

import os

import pytest

from hp_plugin.core.kernels import table

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> table.Kernels:
    """Tensors of the CPU take the rows that CUDA has, Triton and block recursion switched on."""
    chosen = table.Kernels(frozenset({"triton", "blocks"}), {}, {"cpu": "cuda"})
    monkeypatch.setattr(table, "kernels", lambda: chosen)
    return chosen
