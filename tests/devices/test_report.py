"""What is said of devices: what there is, and what keeps one that is installed from being found."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hp_plugin.core.devices import AcceleratorDevice, get_device
from hp_plugin.core.devices import report as module
from hp_plugin.core.devices.report import describe_devices, transfers_to_npu

TRANSFER = "torch_npu.contrib.transfer_to_npu"
OWN = torch.__version__.split("+")[0]


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    original = importlib.metadata.version

    def of(name: str) -> str:
        if name != "torch_npu":
            return original(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(module.importlib.metadata, "version", of)


def npu_lines(environment: dict[str, str]) -> str:
    return "\n".join(line for line in describe_devices(environment) if line.startswith("npu"))


def test_a_machine_without_torch_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert npu_lines({}) == "npu: none (torch_npu is not installed)"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "installed and not imported, since nobody has imported it"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "since TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from it"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "true"}, "AUTOLOAD=true means no: torch takes 1 alone for yes"),
    ],
)
def test_an_installed_but_absent_torch_npu_is_explained(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str
) -> None:
    installed(monkeypatch, OWN)
    assert text in npu_lines(environment)


def test_a_torch_npu_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.11.0")
    assert "torch_npu 1.11.0 is for another torch than" in npu_lines({})
    installed(monkeypatch, f"{OWN}.post2")
    assert "another torch" not in npu_lines({})


def test_an_imported_torch_npu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, OWN)
    npu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 16)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert npu_lines({}) == "npu: 16 devices"
    npu.is_available = lambda: False
    assert "is imported, but finds no device" in npu_lines({})


def test_cuda_means_the_npu_where_torch_npu_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not transfers_to_npu()
    assert get_device("cuda").type == "cuda"
    monkeypatch.setitem(sys.modules, TRANSFER, ModuleType(TRANSFER))
    device = get_device("cuda")
    assert isinstance(device, AcceleratorDevice)
    assert device.type == "npu"
    assert any("torch.cuda stands for the NPU" in line for line in describe_devices({}))


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch finds a torch_npu whose libraries are missing."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    info = tmp_path / f"torch_npu-{OWN}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {OWN}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return {**environment, "PYTHONPATH": path}


def doctor(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hp_plugin.cli", "doctor"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_doctor_explains_a_torch_that_cannot_be_imported_for_its_npu(broken: dict[str, str]) -> None:
    result = doctor(broken)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "torch cannot be imported, since it loads torch_npu by itself and that fails" in last
    assert "libhccl.so" in last
    assert "source its set_env.sh" in last
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in last


@pytest.mark.full
def test_doctor_works_with_autoload_off_and_says_what_that_means(broken: dict[str, str]) -> None:
    result = doctor({**broken, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert "installed and not imported, since TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stdout, result.stderr
