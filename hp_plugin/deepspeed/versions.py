"""Which DeepSpeed is installed, and whether this adapter knows it. Nothing here imports DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from hp_plugin.errors import UnsupportedError

VERIFIED = {(0, 17): "0.17.6", (0, 18): "0.18.9", (0, 19): "0.19.8"}
"""Release series of DeepSpeed whose engine this adapter extends, each with the release that the tests have run."""


def supported_text() -> str:
    """The supported series as people write them: `0.17.x, 0.18.x and 0.19.x`."""
    *others, last = (f"{major}.{minor}.x" for major, minor in VERIFIED)
    return f"{', '.join(others)} and {last}"


def is_installed() -> bool:
    """Whether a package `deepspeed` can be found; it is not imported."""
    try:
        return importlib.util.find_spec("deepspeed") is not None
    except (ImportError, ValueError):
        return False


def deepspeed_version() -> str | None:
    """Version of the installed DeepSpeed, or None when there is none."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_deepspeed() -> str:
    """Return the version of an installed DeepSpeed that this adapter supports.

    Raises:
        UnsupportedError: DeepSpeed is missing, or of another series; the message says what to install.
    """
    version = deepspeed_version()
    advice = 'Install it with pip install "deepspeed>=0.19.8,<0.20"'
    if version is None:
        raise UnsupportedError(f"DeepSpeed was not found. {advice}; hp_plugin supports {supported_text()}.")
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in VERIFIED:
        raise UnsupportedError(
            f"DeepSpeed {version} is installed, but this release of hp_plugin supports {supported_text()} only, "
            f"because it extends DeepSpeed's engine and must know its methods. {advice}."
        )
    return version
