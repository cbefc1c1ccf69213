"""The link with delay: a small C++ program that carries packets between TUN devices.

Kernels without netem cannot delay packets. The program is compiled when it is needed, which takes about two seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.errors import UnavailableError
from bench.testbed import network
from bench.testbed.names import NAMESPACES

_SOURCE = Path(__file__).with_name("delayed_link.cpp")
_TUN = Path("/dev/net/tun")
_COMPILE_LIMIT_S = 180.0
# One packet occupies the link for about 0.3 ms at most, and fast links get large packets, which cost less CPU.
_PACKET_S = 0.3e-3
_DEVICE_QUEUE_S = 40e-3


class DelayedLink:
    """A running program that links namespaces with a rate and a one-way delay.

    Args:
        directory: where the program is built.
        rate_mbit: rate of each supernode's link in Mbit/s, in each direction; None does not limit it.
        delay_ms: one-way delay in ms.
    """

    def __init__(self, directory: Path, *, rate_mbit: float | None, delay_ms: float) -> None:
        self._directory = directory
        self._rate_mbit = rate_mbit
        self._delay_ms = delay_ms
        self._process: subprocess.Popen[str] | None = None

    def start(self, names: list[str]) -> None:
        """Compile and start the program for the namespaces `names`, and give their devices addresses."""
        if not _TUN.exists():
            raise UnavailableError(f"a link with delay needs {_TUN}, which this machine lacks: load the module tun")
        program = self._compile()
        mtu, queue_packets = packet_limits(self._rate_mbit)
        arguments = [os.getpid(), self._rate_mbit or 0, self._delay_ms, network.DEVICE, mtu, queue_packets]
        self._process = subprocess.Popen(
            [str(program), *map(str, arguments), *(str(NAMESPACES / name) for name in names)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline().strip() != "ready":
            said = self._process.stderr.read().strip()
            raise UnavailableError(f"the link with delay could not be made: {said}. It needs tun in the kernel.")
        for index, name in enumerate(names):
            network.set_up(name, index)

    def stop(self) -> None:
        """End the program; its devices vanish with it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _compile(self) -> Path:
        program = self._directory / "delayed_link"
        done = subprocess.run(
            [_compiler(), "-std=c++17", "-O2", "-o", str(program), str(_SOURCE)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise UnavailableError(f"the link with delay does not compile here: {done.stderr.strip()[-600:]}")
        return program


def packet_limits(rate_mbit: float | None) -> tuple[int, int]:
    """(largest packet in bytes, packets that a device queues) for a link of `rate_mbit`."""
    bytes_per_second = (rate_mbit or 10_000.0) * 1e6 / 8
    mtu = min(65_000, max(1_500, round(bytes_per_second * _PACKET_S)))
    return mtu, max(64, round(bytes_per_second * _DEVICE_QUEUE_S / mtu))


def _compiler() -> str:
    named = os.environ.get("CXX", "")
    for candidate in filter(None, (named, "c++", "g++", "clang++")):
        if found := shutil.which(candidate):
            return found
    raise UnavailableError("a link with delay needs a C++ compiler (c++, g++ or clang++, or CXX); none was found")
