"""The native library that the kernel tests run on, and a stand-in for it that counts calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hp_plugin.core.kernels import accumulate, native, sums
from tests.kernels.native_calls import NativeCalls

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> native.NativeLibrary:
    """The library that is installed or that HP_NATIVE_LIBRARY names, else one built from this tree.

    Skips only where there is no compiler either.
    """
    override = os.environ.get(native.OVERRIDE_VARIABLE, "")
    installed = native.find_native("" if override == "none" else override, native.installed_candidates())
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


@pytest.fixture
def native_calls(native_library: native.NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> NativeCalls:
    """The functions that were called natively; every operation of the package uses this library."""
    calls = NativeCalls(native_library)
    library = native.NativeLibrary(native_library.path, native_library.abi_version, native_library.build_info, calls)  # type: ignore[arg-type]
    for module in (accumulate, sums):
        monkeypatch.setattr(module, "load_native", lambda: library)
    return calls


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for torch and, with it, for the native kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
