"""What is published: one wheel for every Python, versions that agree, and a core that stands alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hp_plugin
from hp_plugin.core.kernels import native

REPOSITORY = Path(__file__).resolve().parents[1]


def declared_requirements() -> list[Requirement]:
    return [Requirement(line) for line in importlib.metadata.requires("hp-plugin") or []]


def test_installed_version_is_the_package_version() -> None:
    assert importlib.metadata.version("hp-plugin") == hp_plugin.__version__


def test_every_promised_extra_exists() -> None:
    extras = set(importlib.metadata.metadata("hp-plugin").get_all("Provides-Extra") or [])
    assert extras >= {"megatron", "deepspeed", "test", "bench", "cuda", "npu", "dev"}


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-compat.txt"])
def test_pins_lie_within_the_declared_ranges(name: str) -> None:
    lines = (REPOSITORY / "tools" / name).read_text().splitlines()
    pins = {
        canonicalize_name(package): version
        for package, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }
    assert {"torch", "numpy"} <= set(pins)
    for requirement in declared_requirements():
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is None or requirement.specifier.contains(pinned), f"{requirement}: pinned to {pinned}"


def test_reference_environment_pins_every_declared_package() -> None:
    text = (REPOSITORY / "tools" / "constraints.txt").read_text()
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, flags=re.MULTILINE)}
    not_in_reference = {"emerging-optimizers", "torch-npu", "triton", "hp-plugin"}
    declared = {canonicalize_name(requirement.name) for requirement in declared_requirements()}
    assert declared - not_in_reference <= pinned


def test_importing_the_package_imports_no_host_framework() -> None:
    program = (
        "import sys, hp_plugin, hp_plugin.core.kernels, hp_plugin.core.fsdp\n"
        "found = sorted({name.split('.')[0] for name in sys.modules} & {'megatron', 'deepspeed'})\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=120)


def build_wheel(target: Path, **variables: str) -> Path:
    """Builds the wheel as a user's pip would, in an isolated build environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(target), str(REPOSITORY)]
    built = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = target.glob("*.whl")
    assert re.fullmatch(rf"hp_plugin-{re.escape(hp_plugin.__version__)}-py3-none-[a-z0-9_]+\.whl", wheel.name)
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


@pytest.fixture(scope="module")
def wheel_with_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel has the library only where there is a compiler."""
    status = native.find_native("", native.installed_candidates())
    if status.library is None:
        pytest.skip(status.reason)
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
def test_one_wheel_for_every_python_carries_the_native_library(wheel_with_library: Path) -> None:
    names = names_in(wheel_with_library)
    assert f"hp_plugin/core/kernels/{native.LIBRARY_NAME}" in names
    assert {"hp_plugin/py.typed", "hp_plugin/core/fsdp/__init__.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.split("/")[0] in {"tests", "examples", "docs", "tools", "native"} for name in names)


INSTALLED = """
import shutil, torch
assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang++", "cmake"))), "a compiler is in PATH"
from hp_plugin.core import kernels
total = torch.empty(5)
kernels.sum_in_order_(total, [torch.ones(5), torch.ones(5)], 0.5)
assert torch.equal(total, torch.ones(5))
print(kernels.native_status().library.path)
"""


@pytest.mark.full
def test_the_wheel_brings_the_library_to_a_machine_without_a_compiler(wheel_with_library: Path, tmp_path: Path) -> None:
    environment, nothing = tmp_path / "environment", tmp_path / "nothing"
    nothing.mkdir()
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    install = ["install", "--no-deps", "--no-index", str(wheel_with_library)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, timeout=120)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # torch and the rest come from this environment. What follows a path in its own .pth files, such as the editable
    # installation of this package, is not read.
    (site_packages / "rest.pth").write_text(str(Path(torch.__file__).parents[1]))
    variables = {**os.environ, "PATH": str(nothing)}
    variables.pop(native.OVERRIDE_VARIABLE, None)
    result = subprocess.run(
        [str(python), "-I", "-c", INSTALLED],
        cwd=nothing,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == site_packages / "hp_plugin" / "core" / "kernels" / native.LIBRARY_NAME


@pytest.mark.full
def test_without_a_compiler_the_wheel_is_built_without_the_library(tmp_path: Path) -> None:
    names = names_in(build_wheel(tmp_path, CXX="/nonexistent/compiler"))
    assert "hp_plugin/core/kernels/native.py" in names
    assert f"hp_plugin/core/kernels/{native.LIBRARY_NAME}" not in names


@pytest.mark.full
def test_release_builds_can_demand_the_library(tmp_path: Path) -> None:
    variables = {"CXX": "/nonexistent/compiler", "SKBUILD_CMAKE_DEFINE": "HP_REQUIRE_NATIVE=ON"}
    with pytest.raises(AssertionError, match="HP_REQUIRE_NATIVE is on"):
        build_wheel(tmp_path, **variables)
    assert not list(tmp_path.iterdir())
