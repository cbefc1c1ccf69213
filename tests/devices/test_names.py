"""Only `core/devices` knows one kind of device from another: no other file names one, but for those listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hp_plugin"
VENDORS = {"cuda", "npu", "nccl", "hccl", "xpu", "hpu", "musa", "mlu"}
ALLOWED = {
    "core/devices/": "the place for it",
    "core/kernels/": "which implementation serves a device type",
    "core/muon/kernel_choices.py": "what doctor says of kernels, for each device type",
    "megatron/cpu_compat/": "answers names of torch.cuda on CPU, for Megatron",
    "megatron/connections.py": "a variable of CUDA",
}


def names_in(source: str) -> set[str]:
    """Vendors' names that code uses: attributes of torch, imports, and texts that are or begin a device or backend."""
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in VENDORS:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if _is_vendor(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and _is_vendor(node.module):
            found.add(node.module)
        elif isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in VENDORS:
            found.add(repr(node.value))
    return found


def _is_vendor(module: str) -> bool:
    return module.split(".")[0] in ("torch_npu", "pynvml") or module.startswith(("torch.cuda", "torch.npu"))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torch.cuda.synchronize()", "torch.cuda"),
        ("x.to('cuda:0')", "'cuda:0'"),
        ("if device.type == 'npu': pass", "'npu'"),
        ("dist.init_process_group('nccl')", "'nccl'"),
        ("import torch_npu", "torch_npu"),
        ("from torch.cuda import Stream", "torch.cuda"),
        ("x = y.cuda()", "y.cuda"),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, name: str) -> None:
    assert name in names_in(source)


def test_the_search_leaves_sentences_alone() -> None:
    assert names_in('"""On cuda and npu: streams."""\nx = "device type: cuda, npu"  # cuda') == set()


def test_no_device_is_named_outside_the_place_for_it() -> None:
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).as_posix()
        names = names_in(path.read_text())
        if names and not relative.startswith(tuple(ALLOWED)):
            named[relative] = sorted(names)
    assert named == {}
