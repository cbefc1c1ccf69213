"""The C++ tests of the native library pass, and their script explains what a machine lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tools" / "native.sh"


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def needs_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"There is no C++ compiler '{compiler}' to build the tests with.")


def test_the_cpp_tests_pass_on_every_instruction_set_that_this_cpu_has(tmp_path: Path) -> None:
    needs_compiler()
    result = run_script("test", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "100% tests passed" in result.stdout
    passed = set(re.findall(r"Test +#\d+: (\w+) \.+ +Passed", result.stdout))
    assert {"kernels_as_built", "counters", "exchange", "life"} <= passed


@pytest.mark.full
def test_a_broken_kernel_fails_them(tmp_path: Path) -> None:
    needs_compiler()
    sources = tmp_path / "sources"
    shutil.copytree(REPOSITORY / "native", sources / "native")
    shutil.copytree(REPOSITORY / "tools", sources / "tools")
    shutil.copy(REPOSITORY / "CMakeLists.txt", sources)
    loops = sources / "native" / "src" / "loops.h"
    broken = loops.read_text().replace("0x7FFFu", "0x8000u")  # ties no longer go to even
    assert broken != loops.read_text()
    loops.write_text(broken)
    result = subprocess.run(
        [str(sources / "tools" / "native.sh"), "test", str(tmp_path / "build")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode != 0
    assert "FAILED scale_copy_to_bfloat16" in result.stdout
    assert "FAILED sum_of_float32" not in result.stdout


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    result = run_script("test", str(tmp_path), CXX="no-such-compiler")
    assert result.returncode == 1
    assert "there is no C++ compiler 'no-such-compiler'" in result.stderr


def test_missing_cross_tools_are_named_and_not_installed(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname", "mkdir", "uname"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    result = run_script("aarch64", str(tmp_path / "build"), PATH=str(tools), INSTALL="")
    assert result.returncode == 1
    assert "apt-get install g++-aarch64-linux-gnu qemu-user-static" in result.stderr


def test_an_unknown_command_is_refused_with_the_usage() -> None:
    result = run_script("run")
    assert result.returncode == 1
    assert "usage: tools/native.sh test | sanitize | aarch64" in result.stderr
