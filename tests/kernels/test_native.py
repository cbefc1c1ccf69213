"""Search for the native library: what is found is checked, and what is not used is explained."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hp_plugin.core.kernels import native
from hp_plugin.errors import ConfigurationError


def build_c_library(folder: Path, source: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("No C compiler to build a foreign library with.")
    path = folder / native.LIBRARY_NAME
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(path)], input=source.encode(), check=True, timeout=60
    )
    return path


def test_library_reports_expected_abi_and_its_build(native_library: native.NativeLibrary) -> None:
    assert native_library.abi_version == native.EXPECTED_ABI_VERSION
    assert native_library.build_info.count(",") >= 2


def test_header_and_loader_name_the_same_abi() -> None:
    header = (Path(__file__).resolve().parents[2] / "native" / "hp_native.h").read_text()
    assert f"#define HP_NATIVE_ABI_VERSION {native.EXPECTED_ABI_VERSION}\n" in header


C_TYPES = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "const char*": ctypes.c_char_p,
}


def declared_functions() -> dict[str, tuple[object, tuple[object, ...]]]:
    """Of every function in the header: the ctypes of its result and of its arguments."""
    header = (Path(__file__).resolve().parents[2] / "native" / "hp_native.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    functions = {}
    for result, name, arguments in re.findall(r"HP_API ([\w *]+?) ?(hp_\w+)\(([^)]*)\);", header):
        types = [re.match(r"(.*?)\w+$", argument.strip()).group(1).strip() for argument in arguments.split(",")]  # type: ignore[union-attr]
        found = () if arguments == "void" else tuple(ctypes.c_void_p if "*" in t else C_TYPES[t] for t in types)
        functions[name] = (C_TYPES[result], found)
    return functions


def test_the_loader_declares_exactly_the_functions_of_the_header_with_their_types() -> None:
    declared = declared_functions()
    assert len(declared) == 15
    assert declared.pop("hp_abi_version") == (ctypes.c_int32, ())
    assert declared.pop("hp_build_info") == (ctypes.c_char_p, ())
    assert declared == native._SIGNATURES


def test_the_library_exports_the_functions_of_the_header_and_nothing_else(
    native_library: native.NativeLibrary,
) -> None:
    lister = shutil.which("nm")
    if lister is None:
        pytest.skip("No nm to list the symbols with.")
    listing = subprocess.run(
        [lister, "-D", "--defined-only", str(native_library.path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    # Weak symbols are instances of the C++ library's templates, which every library may carry.
    symbols = {line.split()[2] for line in listing.splitlines() if line.split()[1] not in "VWwu"}
    assert symbols == set(declared_functions())


def test_first_existing_candidate_is_loaded(native_library: native.NativeLibrary, tmp_path: Path) -> None:
    status = native.find_native("", (tmp_path / "absent.so", native_library.path))
    assert status.library is not None
    assert status.library.path == native_library.path
    assert str(native_library.path) in status.reason


def test_missing_library_is_explained(tmp_path: Path) -> None:
    status = native.find_native("", (tmp_path / native.LIBRARY_NAME,))
    assert status.library is None
    assert "not installed" in status.reason
    assert "C++ compiler" in status.reason


def test_other_abi_version_is_refused_by_a_sentence(tmp_path: Path) -> None:
    stale = build_c_library(tmp_path, "int hp_abi_version(void) { return 999; }")
    status = native.find_native("", (stale,))
    assert status.library is None
    assert f"ABI version 999, and this hp_plugin needs {native.EXPECTED_ABI_VERSION}" in status.reason
    with pytest.raises(ConfigurationError, match="ABI version 999"):
        native.find_native(str(stale), ())


def test_foreign_shared_object_is_refused(tmp_path: Path) -> None:
    foreign = build_c_library(tmp_path, "int unrelated(void) { return 1; }")
    status = native.find_native("", (foreign,))
    assert status.library is None
    assert "not hp_plugin's native library" in status.reason


def test_library_with_the_right_abi_but_a_missing_function_is_refused(tmp_path: Path) -> None:
    source = f"""int hp_abi_version(void) {{ return {native.EXPECTED_ABI_VERSION}; }}
    const char* hp_build_info(void) {{ return "truncated"; }}"""
    status = native.find_native("", (build_c_library(tmp_path, source),))
    assert status.library is None
    assert "hp_accumulate_scaled_f32" in status.reason


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / native.LIBRARY_NAME
    broken.write_bytes(b"not an object file")
    status = native.find_native("", (broken,))
    assert status.library is None
    assert "cannot be loaded" in status.reason


def test_override_none_switches_the_library_off(native_library: native.NativeLibrary) -> None:
    status = native.find_native("none", (native_library.path,))
    assert status.library is None
    assert native.OVERRIDE_VARIABLE in status.reason


def test_override_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{native.OVERRIDE_VARIABLE}=.*There is no file"):
        native.find_native(str(tmp_path / "absent.so"), ())


def test_import_loads_no_library() -> None:
    program = (
        "import ctypes\n"
        "import torch\n"
        "def refuse(*args, **kwargs):\n"
        "    raise AssertionError('loaded at import')\n"
        "ctypes.CDLL = refuse\n"
        "import hp_plugin.core.kernels\n"
    )
    repository = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
