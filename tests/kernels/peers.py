"""Other processes for the tests of counters and life locks: they share a memfd and load nothing but the library."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

from hp_plugin.core.kernels import native

STRIDE = 64
"""Bytes from one counter to the next: a cache line."""
DATA = 2048
"""Where in the segment the tests put data, in bytes."""

# What a peer's program finds defined. It does not import torch, so that a process starts in a twentieth of a second.
_PRELUDE = f"""
import ctypes, mmap, os, resource, sys, time
STRIDE, DATA = {STRIDE}, {DATA}
library, file = ctypes.CDLL(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(file, 0)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
data = (ctypes.c_uint64 * 64).from_buffer(memory, DATA)
def publish(index, value):
    library.hp_counter_publish(ctypes.c_void_p(base + index * STRIDE), ctypes.c_uint32(value))
def wait(count, target, timeout, spin=0):
    return library.hp_counters_wait(ctypes.c_void_p(base), count, ctypes.c_size_t(STRIDE), ctypes.c_uint32(target),
                                    ctypes.c_int64(timeout), spin)
def barrier(count, own, number, timeout, spin=0):
    return library.hp_barrier(ctypes.c_void_p(base), count, ctypes.c_size_t(STRIDE), own, ctypes.c_uint32(number),
                              ctypes.c_int64(timeout), spin)
def say(*words):
    print(*words, flush=True)
def rest():
    sys.stdin.read()
"""


class Segment:
    """Anonymous shared memory of one page with counters, and the processes that a test starts on it.

    Attributes:
        file: Descriptor of the memfd.
        functions: The library, on addresses of this process's mapping.
        data: 64-bit words behind the counters.
    """

    def __init__(self, library: native.NativeLibrary) -> None:
        self._library = library
        self.functions = library.functions
        self.file = os.memfd_create("hp-plugin-test")
        os.ftruncate(self.file, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.file, 0)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.data = (ctypes.c_uint64 * 64).from_buffer(self._memory, DATA)
        self._processes: list[subprocess.Popen[str]] = []

    def counter(self, index: int) -> int:
        """The address of a counter."""
        return self._base + index * STRIDE

    def publish(self, index: int, value: int) -> None:
        self.functions.hp_counter_publish(self.counter(index), value)

    def wait(self, count: int, target: int, timeout_us: int, spin: int = 0) -> int:
        return int(self.functions.hp_counters_wait(self.counter(0), count, STRIDE, target, timeout_us, spin))

    def barrier(self, count: int, own: int, number: int, timeout_us: int, spin: int = 0) -> int:
        return int(self.functions.hp_barrier(self.counter(0), count, STRIDE, own, number, timeout_us, spin))

    def start(self, program: str) -> subprocess.Popen[str]:
        """Starts a process that runs `program`, which finds the names of the prelude."""
        process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + program, str(self._library.path), str(self.file)],
            pass_fds=[self.file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Ends what was started. The mapping goes with the object."""
        for process in self._processes:
            process.kill()
            process.wait(timeout=30)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        os.close(self.file)


def line_of(process: subprocess.Popen[str]) -> list[str]:
    """The words of the next line that a process prints; empty at its end."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def result_of(process: subprocess.Popen[str]) -> str:
    """What a process has printed, once it has ended well."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.strip()


@contextlib.contextmanager
def open_segment(library: native.NativeLibrary) -> Iterator[Segment]:
    """A segment that is closed, and whose processes are ended, whatever the test does."""
    segment = Segment(library)
    try:
        yield segment
    finally:
        segment.close()
