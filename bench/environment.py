"""What machine and versions the figures of a report came from. No host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "megatron-core", "deepspeed", "numpy")


def environment() -> dict[str, Any]:
    """Facts that hold for the whole run, and the load when it starts; `finished` adds the load at its end."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "hp_plugin": _version("hp-plugin") or _source_version(),
        "revision": _revision(),
        **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
        "tcp_congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "load_average_start": _load(),
    }


def finished(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts` with the load average now. A load far above what the benchmark itself causes makes its times noise."""
    return {**facts, "load_average_end": _load()}


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_version() -> str | None:
    found = re.search(r'__version__ = "([^"]+)"', _read(_REPOSITORY / "hp_plugin" / "_version.py") or "")
    return found.group(1) if found else None


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu_model() -> str | None:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1) if found else None


def _revision() -> str | None:
    """The short commit of the checkout, with `-dirty` when tracked files differ from it; None outside a checkout."""
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
