"""Rank functions of the tests of segments."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hp_plugin.core.transport.shm import segment as segment_module
from tests.faults.watched import End, end_process, segments_of, watch
from tests.support import init_gloo
from tests.support.told import told
from tests.transport.shm_ranks import make_segment


def write_and_read(*, nbytes: int) -> dict[str, Any]:
    """Every rank writes its part of one memory, and reads all of it."""
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    files, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    segment = make_segment(nbytes)
    words = segment.tensor(0, segment.nbytes // 8, torch.int64)
    zero = bool((words == 0).all())
    dist.barrier()
    words[rank::ranks] = torch.arange(len(words))[rank::ranks]
    dist.barrier()
    found: dict[str, Any] = {
        "nbytes": segment.nbytes,
        "zero at first": zero,
        "all is seen": torch.equal(words, torch.arange(len(words))),
        "empty": segment.tensor(0, 0, torch.float32).numel(),
        "alive": [segment.is_alive(other) for other in range(ranks) if other != rank],
        "memory files": set(segments_of(os.getpid())),
        "inherited": [os.get_inheritable(int(each)) for each in _memory_descriptors()],
        "new descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
        "new names": [each for each in set(os.listdir("/dev/shm")) - files if "hyperfsdp" in each],
    }
    dist.barrier()
    del segment
    found["tensor outlives the segment"] = int(words[-1]) == len(words) - 1
    found["mapped while a tensor lives"] = set(segments_of(os.getpid()))
    del words
    found["after the last tensor"] = segments_of(os.getpid())
    found["descriptors after"] = len(os.listdir("/proc/self/fd")) - descriptors
    dist.barrier()
    return found


def _memory_descriptors() -> list[str]:
    folder = Path("/proc/self/fd")
    names = [each for each in os.listdir(folder) if (folder / each).exists() or os.path.islink(folder / each)]
    return [each for each in names if "memfd:hyperfsdp" in os.readlink(folder / each)]


def share_among_strangers(*, as_user: int | None, token: bytes) -> dict[str, Any]:
    """A process that is no rank connects before the ranks do. It says `token`, and may run as another user.

    Where that is b"the right one" it says what the ranks say.
    """
    init_gloo()
    got: list[int] = []
    agree = segment_module.agree

    def agree_after_a_stranger(group: Any, value: Any, **options: Any) -> Any:
        if dist.get_rank() == 0 and isinstance(value, tuple) and value and value[0]:
            # Rank 0 listens, and nobody has its address yet.
            token_sent = value[1] if token == b"the right one" else token
            got.append(_start_stranger(value[0], token_sent, as_user))
        return agree(group, value, **options)

    with mock.patch.object(segment_module, "agree", agree_after_a_stranger):
        segment = make_segment()
    words = segment.tensor(0, 8, torch.int64)
    words[dist.get_rank()] = dist.get_rank() + 1
    dist.barrier()
    found = {"words": words[: dist.get_world_size()].tolist(), "stranger": None}
    if got:
        _, status = os.waitpid(got[0], 0)
        found["stranger"] = {7: "got nothing", 8: "got a descriptor"}.get(os.waitstatus_to_exitcode(status), "failed")
    return found


def _start_stranger(name: bytes, token: bytes, as_user: int | None) -> int:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if as_user is not None:
                os.setgid(as_user)
                os.setuid(as_user)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                channel.settimeout(20.0)
                channel.connect(name)
                if token:
                    channel.sendall(token)
                os.write(write, b"c")
                code = 7
                try:
                    _, files, _, _ = socket.recv_fds(channel, 1, 1)
                    code = 8 if files else 7
                except ConnectionError:
                    pass
        finally:
            os._exit(code)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    return pid


def make_with_few_descriptors(*, odd: int, spare: int) -> dict[str, Any]:
    """Rank `odd` may open only `spare` more files; then all try again without that limit."""
    init_gloo()
    make_segment()  # connects, and loads the native library
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == odd:
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, before[1]))
    try:
        text = told(make_segment)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    left = segments_of(os.getpid())
    return {"told": text, "left": left, "then": told(make_segment)}


def make_without_library(*, odd: int) -> str:
    """Rank `odd` has no native library."""
    init_gloo()
    if dist.get_rank() == odd:
        with mock.patch.object(segment_module, "load_native", return_value=None):
            return told(make_segment)
    return told(make_segment)


def leave_before_agreeing(*, directory: str, ranks: int) -> End:
    """The last rank ends before it makes the segment that the others make."""

    def work() -> None:
        init_gloo()
        if dist.get_rank() == ranks - 1:
            end_process("kill")
        make_segment()

    return watch(work, directory=directory, ranks=ranks)
