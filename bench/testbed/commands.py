"""`ip` and `tc`: run them, check that they may be run, install them when they are missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from bench.errors import UnavailableError
from bench.report import say

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_LIMIT_S = 30.0
_INSTALL_LIMIT_S = 120.0


class CommandError(UnavailableError):
    """`ip` or `tc` refused something; the message carries its own words."""


def ip(*arguments: str, namespace: str | None = None) -> str:
    """Run `ip`, inside `namespace` if one is given, and return its standard output."""
    return _run("ip", arguments, namespace)


def ip_json(*arguments: str, namespace: str | None = None) -> Any:
    """Like `ip`, with statistics, parsed."""
    return json.loads(_run("ip", ("-s", "-j", *arguments), namespace))


def tc(*arguments: str, namespace: str) -> str:
    """Run `tc` inside `namespace` and return its standard output."""
    return _run("tc", arguments, namespace)


def require_root() -> None:
    """Raise a sentence unless this process may make network namespaces."""
    if os.geteuid() != 0:
        raise UnavailableError(
            "the testbed needs root to make network namespaces, and this process runs as user "
            f"{os.geteuid()}. Run it as root, or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."
        )


def require_programs() -> None:
    """Make sure that `ip` and `tc` exist; root on a system with apt-get gets iproute2 installed."""
    missing = _missing_programs()
    if not missing:
        return
    advice = f"{' and '.join(missing)} not found: install the package iproute2"
    apt_get = shutil.which("apt-get", path=_PATH)
    if os.geteuid() != 0 or apt_get is None:
        raise UnavailableError(advice)
    say(f"installing iproute2, which the testbed needs for {' and '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for arguments in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "iproute2"]):
        command = [apt_get, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=_INSTALL_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            said = f"no end within {_INSTALL_LIMIT_S:g} s"
            break
        said = done.stderr.strip()[-300:]
    if _missing_programs():
        raise UnavailableError(f"{advice} (apt-get ended with: {said})")


def _missing_programs() -> list[str]:
    return [program for program in ("ip", "tc") if shutil.which(program, path=_PATH) is None]


def _run(program: str, arguments: tuple[str, ...], namespace: str | None) -> str:
    executable = shutil.which(program, path=_PATH)
    if executable is None:
        raise UnavailableError(f"{program} not found: install the package iproute2")
    command = [executable, *(["-n", namespace] if namespace else []), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(f"`{program} {' '.join(arguments)}` did not end within {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise CommandError(
            f"the testbed could not be made: `{program} {' '.join(arguments)}` said: {done.stderr.strip()}. "
            "It needs CAP_SYS_ADMIN and CAP_NET_ADMIN, and veth, bridge, tbf and tun in the kernel."
        )
    return done.stdout
