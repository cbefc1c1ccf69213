"""The native library that the kernel tests run on: the installed one, else one built here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hp_plugin.core.kernels import native

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> native.NativeLibrary:
    """The library built from this tree's sources; skips only where no compiler and no installed library exist."""
    installed = native.find_native("", native.installed_candidates())
    if installed.library is not None:
        return installed.library
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip(f"{installed.reason} There is no C++ compiler to build one for the test either.")
    target = tmp_path_factory.mktemp("native") / native.LIBRARY_NAME
    sources = [str(path) for path in sorted((REPOSITORY / "native" / "src").glob("*.cpp"))]
    options = ["-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    command = [compiler, *options, f"-I{REPOSITORY / 'native'}", *sources, "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    built = native.find_native(str(target), ())
    assert built.library is not None
    return built.library
