"""Which Megatron-LM is installed, and whether this adapter knows it.

Everything here works without importing Megatron, so that ``hp-plugin doctor`` can report on an
installation that does not import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hp_plugin.errors import UnsupportedError


@dataclass(frozen=True)
class Release:
    """What there is to know about a release series before it is imported.

    Attributes:
        verified: The release of the series that the tests run.
        python: Lowest Python that its wheel or source needs.
        wheel_has_training: Whether the wheel holds megatron.training, or megatron.core only.
    """

    verified: str
    python: tuple[int, int]
    wheel_has_training: bool


RELEASES = {
    (0, 12): Release("0.12.1", (3, 10), wheel_has_training=False),
    (0, 16): Release("0.16.1", (3, 10), wheel_has_training=False),
    (0, 17): Release("0.17.1", (3, 12), wheel_has_training=True),
    (0, 18): Release("0.18.2", (3, 12), wheel_has_training=True),
    (0, 19): Release("0.19.2", (3, 12), wheel_has_training=True),
}
"""Release series of megatron-core whose names and signatures are in the table of ``targets``."""

SUPPORTED = tuple(RELEASES)


def supported_text() -> str:
    """The supported series as people write them, for example ``0.18.x and 0.19.x``."""
    *others, last = (f"{major}.{minor}.x" for major, minor in SUPPORTED)
    return f"{', '.join(others)} and {last}" if others else last


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


def check_megatron(*, training: bool = True) -> str:
    """Return the version of an installed Megatron that this adapter supports.

    Args:
        training: Whether ``megatron.training`` is needed too, as for the flags. A loop of one's own around the wrapper
            needs ``megatron.core`` alone.

    Raises:
        UnsupportedError: Megatron is missing, has no ``megatron.training``, or is of another series; or
            this Python is too old for it. The message is one sentence that says what to install.
    """
    version = megatron_version()
    here = ".".join(map(str, sys.version_info[:3]))
    if version is None:
        raise UnsupportedError(
            "Megatron-LM was not found: no module megatron.core can be imported. Install it with "
            f'pip install "megatron-core[training]~=0.19.2" (Python >= 3.12; this is {here}), or put a checkout of '
            f"Megatron-LM on PYTHONPATH; hp_plugin supports {supported_text()}."
        )
    release = RELEASES.get(series(version))
    if release is None:
        raise UnsupportedError(
            f"megatron-core {version} is installed, but this release of hp_plugin supports {supported_text()} only, "
            "because it rebinds names inside Megatron whose signatures it must know. "
            "Install one of those, for example megatron-core 0.19.2."
        )
    if sys.version_info < release.python:
        raise UnsupportedError(
            f"megatron-core {version} needs Python >= {'.'.join(map(str, release.python))}, but this is Python {here}. "
            "Make an environment with a newer Python."
        )
    if training and not has_training():
        advice = (
            f'Install the wheel with its extra, pip install "megatron-core[training]=={version}", or put'
            if release.wheel_has_training
            else "The wheels of this series hold megatron.core only: put"
        )
        raise UnsupportedError(
            f"megatron-core {version} is installed without the module megatron.training. "
            f"{advice} a checkout of Megatron-LM of the same version on PYTHONPATH."
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
