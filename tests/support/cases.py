"""Rank functions that the tests of the support run."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from tests.support import init_gloo


def rank() -> int:
    return int(os.environ["RANK"])


def sum_of_ranks(*, weight: int) -> dict[str, Any]:
    """All-reduce rank * weight; returns the sum and the facts of this rank's process."""
    import torch
    import torch.distributed as dist

    init_gloo()
    value = torch.tensor([float(rank() * weight)])
    dist.all_reduce(value)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA")
    return {
        "sum": value,
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "environment": {name: os.environ.get(name) for name in names},
    }


def print_rank() -> None:
    print(f"printed by rank {rank()}")


def raise_on(*, ranks: list[int]) -> None:
    """Raise on some ranks while the others wait for them in a collective."""
    import torch.distributed as dist

    init_gloo()
    if rank() in ranks:
        print("about to fail")
        raise ValueError(f"rank {rank()} was told to fail")
    dist.barrier()
    time.sleep(600)


def exit_on(*, failing_rank: int, code: int | str | None) -> int:
    if rank() == failing_rank:
        sys.exit(code)
    return rank()


def die_on(*, failing_rank: int) -> None:
    if rank() == failing_rank:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def hang() -> None:
    function_that_hangs()


def function_that_hangs() -> None:
    time.sleep(600)


def start_manager(*, pid_file: str | None, then: str) -> None:
    """Start a spawn Manager, as Megatron's checkpointing does, note its pid, then "return", "raise" or "hang"."""
    manager: Any = multiprocessing.get_context("spawn").Manager()
    manager.Queue().put(1)
    block = shared_memory.SharedMemory(create=True, size=4096)
    if pid_file is not None:
        line = f"{os.getpid()} {manager._process.pid} {block.name}\n"
        Path(f"{pid_file}.{rank()}").write_text(line)
    if then == "raise":
        raise ValueError("raised beside a running manager")
    if then == "hang":
        time.sleep(600)
    block.close()
    block.unlink()


def leave_a_daemon_behind() -> None:
    """Start a process that nobody ends, in a session of its own."""
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def loaded_modules(*, names: list[str]) -> list[bool]:
    return [name in sys.modules for name in names]
