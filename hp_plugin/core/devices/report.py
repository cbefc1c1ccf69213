"""What this machine has in devices, for people: `hp-plugin doctor` prints it. Nothing is initialised beyond a count."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TRANSFER = "torch_npu.contrib.transfer_to_npu"


def describe_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One line or more for each kind of device: what there is, and what keeps it from being found.

    Args:
        environment: Variables.
    """
    lines = [f"cpu: {os.cpu_count()} cores, {platform.machine()}, torch uses {torch.get_num_threads()} threads"]
    stands_in = transfers_to_npu()
    if torch.cuda.is_available() and not stands_in:
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        lines.append(f"cuda: {torch.cuda.device_count()} devices ({', '.join(names)})")
    elif stands_in:
        lines.append(f"cuda: torch.cuda stands for the NPU here ({_TRANSFER}); hp_plugin asks torch.npu")
    else:
        lines.append("cuda: none")
    return lines + _npu_lines(environment)


def transfers_to_npu() -> bool:
    """Whether torch_npu has put itself in the place of `torch.cuda`."""
    return _TRANSFER in sys.modules


def describe_backends() -> list[str]:
    """Communication backends that this torch can use."""
    checks = (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available), ("mpi", dist.is_mpi_available))
    found = [name for name, check in checks if check()]
    return found + (["hccl"] if "hccl" in dist.Backend.backend_list else [])


def _npu_lines(environment: Mapping[str, str]) -> list[str]:
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        version = None
    setting = environment.get(AUTOLOAD_VARIABLE)
    lines = []
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        lines.append(f"npu: {npu.device_count()} devices")
    elif version is None:
        lines.append("npu: none (torch_npu is not installed)")
    elif npu is not None:
        lines.append(
            f"npu: torch_npu {version} is imported, but finds no device (npu-smi info shows the driver's view)"
        )
    else:
        why = "nobody has imported it" if setting is None else f"{AUTOLOAD_VARIABLE}={setting} keeps torch from it"
        lines.append(
            f"npu: torch_npu {version} is installed and not imported, since {why}: hp_plugin takes another device. "
            "Import torch_npu before hp_plugin, or unset the variable"
        )
    if version is not None and setting not in (None, "0", "1"):
        lines.append(f"npu: {AUTOLOAD_VARIABLE}={setting} means no: torch takes 1 alone for yes")
    if version is not None and not _same_release(version):
        lines.append(
            f"npu: torch_npu {version} is for another torch than {torch.__version__}; install the one of its number"
        )
    return lines


def _same_release(version: str) -> bool:
    return version.split(".")[:2] == torch.__version__.split(".")[:2]
