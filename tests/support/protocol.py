"""What pytest and a zygote tell each other, and how. Standard library only."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One multi-process job: `target` ("module:function") called with `kwargs` on `nprocs` ranks."""

    target: str
    kwargs: dict[str, Any]
    nprocs: int
    timeout_s: float
    environment: dict[str, str]
    directory: str

    def log_path(self, rank: int) -> Path:
        """Standard output and error of `rank`."""
        return Path(self.directory, f"rank{rank}.log")

    def result_path(self, rank: int) -> Path:
        """Pickled return value of `rank`."""
        return Path(self.directory, f"rank{rank}.pickle")

    def error_path(self, rank: int) -> Path:
        """Traceback, or reason of exit, of `rank`."""
        return Path(self.directory, f"rank{rank}.error")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        state: "returned"; "failed" (raised, or left by `sys.exit` with a code other than 0); "died" (by a signal or
            `os._exit`); "stopped" (ended by the support because a peer failed, or the time was up).
        exit_code: code of the process as `subprocess` gives it (negative: signal).
    """

    state: str
    exit_code: int | None


@dataclass(frozen=True)
class Outcome:
    """What the zygote answers: how each rank ended, whether the time was up, and what outlived an orderly end."""

    ranks: list[RankEnd]
    timed_out: bool
    left_behind: list[str] = field(default_factory=list)


def send(sock: socket.socket, message: object) -> None:
    """Send one pickled message."""
    body = pickle.dumps(message)
    sock.sendall(struct.pack("!Q", len(body)) + body)


def receive(sock: socket.socket) -> Any:
    """Receive one pickled message; raises EOFError when the other side is gone."""
    (length,) = struct.unpack("!Q", _receive_exactly(sock, 8))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    chunks = []
    while length:
        chunk = sock.recv(min(length, 1 << 20))
        if not chunk:
            raise EOFError("the other side of the test-support channel is gone")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)
