"""Which Megatron-LM is installed, and whether this adapter knows it.

Everything here works without importing Megatron, so that ``hp-plugin doctor`` can report on an
installation that does not import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from hp_plugin.errors import UnsupportedError

SUPPORTED = ((0, 19),)
"""Release series of megatron-core whose names and signatures are in the table of ``rebind``."""

MINIMUM_PYTHON = (3, 12)
"""What the wheels of megatron-core 0.17 and newer require."""


def supported_text() -> str:
    """The supported series as people write them, for example ``0.19.x``."""
    return ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)


def megatron_version() -> str | None:
    """Version of the installed megatron-core, or None when it cannot be found.

    A source checkout on the path has no distribution metadata; its ``package_info.py`` is read then.
    """
    root = _core_directory()
    if root is None:
        return None
    info = root / "package_info.py"
    if info.is_file():
        text = info.read_text(encoding="utf-8")
        parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
        if all(parts):
            suffix = re.search(r"^PRE_RELEASE\s*=\s*['\"](.*)['\"]", text, re.MULTILINE)
            return ".".join(part[1] for part in parts if part) + (suffix[1] if suffix else "")
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def series(version: str) -> tuple[int, int]:
    """``(major, minor)`` of a version string such as ``0.19.2``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UnsupportedError(f"megatron-core reports the version {version!r}, which has no MAJOR.MINOR to go by.")
    return int(match[1]), int(match[2])


def check_megatron() -> str:
    """Return the version of an installed Megatron that this adapter supports.

    Raises:
        UnsupportedError: Megatron is missing, has no ``megatron.training``, or is of another series; or
            this Python is too old for it. The message is one sentence that says what to install.
    """
    version = megatron_version()
    here = ".".join(map(str, sys.version_info[:3]))
    if version is None:
        need = "" if sys.version_info >= MINIMUM_PYTHON else f" and needs Python >= 3.12 (this is {here})"
        raise UnsupportedError(
            "Megatron-LM was not found: no module megatron.core can be imported. Install it with "
            f'pip install "megatron-core[training]~=0.19.2"; hp_plugin supports {supported_text()}{need}.'
        )
    if series(version) not in SUPPORTED:
        raise UnsupportedError(
            f"megatron-core {version} is installed, but this release of hp_plugin supports {supported_text()} only, "
            "because it rebinds names inside Megatron whose signatures it must know. "
            'Install "megatron-core[training]~=0.19.2" (Python >= 3.12).'
        )
    if sys.version_info < MINIMUM_PYTHON:
        raise UnsupportedError(
            f"megatron-core {version} needs Python >= 3.12, but this is Python {here}. "
            "Make an environment with a newer Python."
        )
    if not has_training():
        raise UnsupportedError(
            f"megatron-core {version} is installed without the module megatron.training. "
            'Install the wheel with its extra, pip install "megatron-core[training]~=0.19.2", '
            "or put a checkout of Megatron-LM of the same version on PYTHONPATH."
        )
    return version


def has_training() -> bool:
    """Whether ``megatron.training`` exists beside ``megatron.core`` (nothing of Megatron is imported)."""
    parent = importlib.util.find_spec("megatron")
    if parent is None or parent.submodule_search_locations is None:
        return False
    return any((Path(place) / "training" / "arguments.py").is_file() for place in parent.submodule_search_locations)


def _core_directory() -> Path | None:
    # find_spec("megatron.core") would import the namespace package's parent only, never megatron.core itself.
    try:
        spec = importlib.util.find_spec("megatron")
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        core = Path(place) / "core"
        if core.is_dir():
            return core
    return None
