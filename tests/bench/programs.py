"""Programs that the tests run as ranks of a testbed: `python -m tests.bench.programs NAME`. Most need no torch."""

from __future__ import annotations

import os
import socket
import sys
import time

from bench.testbed import worker

RANK = int(os.environ.get("RANK", "-1"))
WORLD = int(os.environ.get("WORLD_SIZE", "-1"))
MASTER = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
MESSAGES = 5
MESSAGE_BYTES = 4_000_000
PINGS = 20


def connect() -> socket.socket:
    """A connection to rank 0, which may start later."""
    limit = time.monotonic() + 30.0
    while True:
        try:
            connection = socket.create_connection(MASTER, timeout=30.0)
        except ConnectionRefusedError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def accept() -> socket.socket:
    """The connection of rank 1."""
    with socket.create_server(MASTER) as listener:
        listener.settimeout(30.0)
        return listener.accept()[0]


def meet() -> None:
    """Every rank tells rank 0 its host name over the network; ranks publish what they are."""
    if RANK:
        with connect() as connection:
            connection.sendall(socket.gethostname().encode().ljust(64))
            connection.recv(1)  # returns when rank 0 has heard everybody
    hosts = {}
    if RANK == 0:
        with socket.create_server(MASTER) as listener:
            listener.settimeout(30.0)
            peers = [listener.accept() for _ in range(WORLD - 1)]
            hosts = {connection.recv(64).decode().strip(): address[0] for connection, address in peers}
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "EXTRA")
    environment = {name: os.environ.get(name) for name in names}
    worker.publish({"host": socket.gethostname(), "supernode": worker.supernode(), "met": hosts, "env": environment})
    print(f"rank {RANK} has met everybody")


def stream() -> None:
    """Rank 0 sends messages and publishes when each began, rank 1 when the last byte of each had come.

    Both clocks are the machine's, so no scheduling can make a message look faster than it was.
    """
    times = []
    with accept() if RANK == 0 else connect() as connection:
        for _ in range(MESSAGES):
            if RANK == 0:
                times.append(time.monotonic())
                connection.sendall(bytes(MESSAGE_BYTES))
                connection.recv(1)
            else:
                left = MESSAGE_BYTES
                while left:
                    chunk = len(connection.recv(min(left, 1 << 20)))
                    assert chunk, "the peer is gone"
                    left -= chunk
                times.append(time.monotonic())
                connection.sendall(b"+")
    worker.publish(times)


def ping() -> None:
    """Rank 1 publishes round-trip times of one byte, in seconds."""
    with accept() if RANK == 0 else connect() as connection:
        times = []
        for _ in range(PINGS):
            started = time.perf_counter()
            if RANK == 0:
                connection.sendall(connection.recv(1))
            else:
                connection.sendall(b"?")
                connection.recv(1)
            times.append(time.perf_counter() - started)
    worker.publish(times)


def all_reduce() -> None:
    """All-reduce 4 MiB four times between the supernodes; publish what the link counted on this side meanwhile."""
    import torch
    import torch.distributed as dist

    with worker.gloo():
        operand = torch.zeros(1 << 20)
        dist.all_reduce(operand)
        dist.barrier()
        before = worker.link_bytes()
        for _ in range(4):
            dist.all_reduce(operand)
        dist.barrier()
        moved = worker.link_bytes() - before
    worker.publish({"payload": 4 * operand.nbytes, "sent": moved.sent, "received": moved.received})


def fail() -> None:
    """Rank 1 fails while rank 0 would run for minutes."""
    if RANK == 1:
        print("about to fail")
        raise ValueError("rank 1 was told to fail")
    time.sleep(600)


def hang() -> None:
    """Say the pid and never end."""
    print(os.getpid(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
