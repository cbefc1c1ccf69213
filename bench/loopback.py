"""Ranks on the loopback interface, for benchmarks that need collectives but no particular network."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bench.errors import BenchError

_PR_SET_PDEATHSIG = 1
_JOIN_S = 10.0


def run_on_loopback(
    target: Callable[..., Any],
    *,
    nprocs: int,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls `target(**kwargs)` on `nprocs` ranks with a gloo group over loopback and gives their results by rank.

    Args:
        target: Function at module level; it finds the default process group made, and one thread per rank.
        nprocs: Number of ranks.
        timeout_s: Limit for the whole run. No rank outlives it, nor this process.
        environment: Variables that ranks have beside those of this process, from their very start.
        **kwargs: Its arguments, picklable, as must be its result.

    Raises:
        BenchError: A rank raised or died, or the time was up; the message has the first failure's traceback.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="hp_bench_") as directory:
        try:
            for rank in range(nprocs):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, os.path.join(directory, "store"), rank, nprocs, timeout_s, target, kwargs)
                process: BaseProcess = context.Process(target=_run_rank, args=arguments, daemon=True)
                with _environment(environment or {}):
                    process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            results = _collect(connections, time.monotonic() + timeout_s, timeout_s)
            for process in processes:
                process.join(_JOIN_S)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which one that is started inherits, for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(connections: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        missing = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(connections)) if rank not in results]
            raise BenchError(f"ranks {late} did not finish within {timeout_s:g} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                failure, value = connection.recv()
            except EOFError:
                raise BenchError(f"rank {rank} died without a message; the system log may say why") from None
            if failure:
                raise BenchError(f"rank {rank} failed:\n{failure}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _run_rank(
    connection: Connection,
    store: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    target: Callable[..., Any],
    kwargs: dict[str, Any],
) -> None:
    _end_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A rank with a thread per core would fight its peers for the cores; libraries read this when they are imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        value = target(**kwargs)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        connection.send((traceback.format_exc(), None))
    else:
        connection.send((None, value))
    connection.close()


def _end_with_parent() -> None:
    """Asks the kernel to end this process when its parent dies, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
