"""Becomes a rank: `python enter.py PARENT NAMESPACE HOSTNAME COMMAND...`.

Enters the network namespace, takes a host name of its own, so that detection by host name sees the supernodes, and asks
the kernel to end this process with its parent; then it executes the command. Standard library only: it runs before
every rank, without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


def main(parent: int, namespace: str, hostname: str, command: list[str]) -> None:
    """Prepare this process and replace it by `command`; the exit code is 127 if that cannot be executed."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    _check(libc.setns(descriptor, _CLONE_NEWNET), f"setns({namespace})")
    _check(libc.unshare(_CLONE_NEWUTS), "unshare(CLONE_NEWUTS)")
    socket.sethostname(hostname)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be executed: {error}", file=sys.stderr)
        os._exit(127)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
