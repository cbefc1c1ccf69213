"""Rank functions of the tests of the parts of shared memory: segment, counters, rings."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hp_plugin.core.transport.shm import GradientRing, PeerError, Segment, Signals
from hp_plugin.core.transport.shm import segment as segment_module
from hp_plugin.core.transport.shm.ring import entry_bytes
from hp_plugin.core.transport.shm.signals import signal_bytes
from tests.faults.watched import End, end_process, segments_of, watch
from tests.support import init_gloo

ROWS = 4
COUNTERS = 0
"""Row of the tests' own counters; the rings have the two that follow."""
READY, DONE = 1, 2
RING_AT = 4096


def told(work: Callable[[], Any]) -> str:
    """Type and message of what `work` raises; "runs" where it does not."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "runs"


def make_segment(nbytes: int = RING_AT, *, group: dist.ProcessGroup | None = None) -> Segment:
    group = group or dist.group.WORLD
    assert group is not None
    share = nbytes // group.size()
    return Segment(group, nbytes, owned=[(group.rank() * share, (group.rank() + 1) * share)])


def make_signals(segment: Segment, *, timeout_s: float = 30.0) -> Signals:
    assert signal_bytes(ROWS, segment.size) <= RING_AT
    return Signals(segment, 0, timeout_s=timeout_s)


def make_ring(capacity: int, *, timeout_s: float = 30.0) -> GradientRing:
    segment = make_segment(RING_AT + dist.get_world_size() * capacity)
    signals = make_signals(segment, timeout_s=timeout_s)
    return GradientRing(
        segment, RING_AT, capacity=capacity, signals=signals, rows=(READY, DONE), name_of=lambda index: f"unit{index}"
    )


class Turn:
    """A store through which ranks of a test take turns, beside what is tested."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def say(self, word: str) -> None:
        self._store.set(f"turn/{word}", "1")

    def wait_for(self, word: str) -> None:
        self._store.wait([f"turn/{word}"])


# ---- segment ------------------------------------------------------------------------------------------------------


def _sockets() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if "@hyperfsdp" in line]


def write_and_read(*, nbytes: int) -> dict[str, Any]:
    """Every rank writes its part of one memory, and reads all of it."""
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    files, descriptors, sockets = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), _sockets()
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
        "new sockets": [each for each in _sockets() if each not in sockets and f" {os.getpid()} " in each],
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


# ---- counters -----------------------------------------------------------------------------------------------------


def wait_for_the_one_behind() -> dict[str, Any]:
    """Ranks 1 and 3 of four share memory; 3 does not publish."""
    init_gloo()
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        dist.barrier()
        return {}
    assert isinstance(group, dist.ProcessGroup)
    signals = make_signals(make_segment(group=group), timeout_s=0.5)
    found: dict[str, Any] = {}
    if dist.get_rank() == 1:
        signals.publish(COUNTERS, 5)
        began = time.monotonic()
        found["told"] = told(lambda: signals.wait(COUNTERS, 5, lambda: "do its part of unit u in forward"))
        found["after"] = time.monotonic() - began
        found["own"] = told(lambda: signals.wait(COUNTERS, 3, lambda: "x")) if signals.has_reached(COUNTERS, 0) else ""
    dist.barrier()
    if dist.get_rank() == 3:
        found["own alone"] = told(lambda: signals.wait(COUNTERS, 4, lambda: "do something"))
    dist.barrier(group)
    return found


def wait_for_one_that_ends(*, directory: str, ranks: int, does_its_part: bool) -> tuple[End, float]:
    """The last rank ends. The others wait for all, of which rank 1 lives and is behind as well."""

    def work() -> float:
        init_gloo()
        segment = make_segment()
        signals, rank = make_signals(segment), dist.get_rank()
        turn = Turn()
        if rank == ranks - 1:
            if does_its_part:
                signals.publish(COUNTERS, 1)
            Path(directory, "ended at").write_text(repr(time.monotonic()))
            end_process("kill")
        if does_its_part:
            while segment.is_alive(ranks - 1):
                time.sleep(0.01)
        if does_its_part or rank != 1:
            signals.publish(COUNTERS, 1)
        signals.wait(COUNTERS, 1, lambda: "do its part of unit u in forward")
        turn.say(f"through {rank}")
        return 0.0

    end = watch(work, directory=directory, ranks=ranks)
    return end, float(Path(directory, "ended at").read_text())


def wrap_around() -> list[int]:
    """Counters pass 2 ** 32 in step on two ranks."""
    init_gloo()
    signals = make_signals(make_segment())
    start = (1 << 32) - 20
    for row in (COUNTERS, READY):
        signals.publish(row, start)
    dist.barrier()
    passed = []
    for value in range(start + 1, start + 41):
        signals.publish(COUNTERS, value)
        signals.wait(COUNTERS, value, lambda: "count")
        assert not signals.has_reached(COUNTERS, value + 2), "a peer is at most one ahead"
        passed.append(value)
        signals.publish(READY, value)
        signals.wait(READY, value, lambda: "count")
    return passed


class _InterruptError(Exception):
    pass


def interrupt_a_wait(*, number: int) -> dict[str, Any]:
    """A signal arrives during a wait that would last for half a minute."""
    init_gloo()
    signals = make_signals(make_segment())
    if dist.get_rank() == 1:
        dist.barrier()
        return {}

    def handle(*_: Any) -> None:
        raise _InterruptError

    before = signal.signal(number, handle) if number != signal.SIGINT else None
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
    began = time.monotonic()
    try:
        signals.wait(COUNTERS, 1, lambda: "do nothing")
        name = "returned"
    except (_InterruptError, KeyboardInterrupt) as error:
        name = type(error).__name__
    found = {"raised": name, "after": time.monotonic() - began}
    if before is not None:
        signal.signal(number, before)
    dist.barrier()
    return found


def fail_on_the_lane() -> dict[str, str]:
    """What this rank's own thread failed with is what a wait for its counters says."""
    init_gloo()
    signals = make_signals(make_segment())
    dist.barrier()
    found = {}
    for name, failure in (("peer", PeerError("rank 9 has ended")), ("other", ArithmeticError("a sum"))):
        signals.failure = failure
        found[name] = told(lambda: signals.wait(COUNTERS, 1, lambda: "do nothing"))
    dist.barrier()
    return found


# ---- rings --------------------------------------------------------------------------------------------------------


def _operand(entry: int, index: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * entry + 100 * index + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (entry % 4)).to(dtype)


def _expected(entry: int, index: int, rank: int, ranks: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(length, dtype=wide)
    for other in range(ranks):
        part = _operand(entry, index, other, ranks * length, dtype).view(ranks, length)[rank].to(wide)
        total = part if other == 0 else total + part
    return total


def sums(*, dtypes: Sequence[torch.dtype], entries: int) -> list[str]:
    """Reduces entries of changing sizes in a ring that holds two or three of them; returns what is wrong."""
    init_gloo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in dtypes:
        sizes = [[7, 1, 64], [33], [5, 5], [1], [40, 2]]
        largest = max(entry_bytes([ranks * n * dtype.itemsize for n in lengths]) for lengths in sizes)
        ring = make_ring(2 * largest + 192)
        waiting: list[tuple[int, list[torch.Tensor], Any]] = []
        for number in range(entries):
            lengths = sizes[number % len(sizes)]
            entry, must_be_done = ring.place(number % 5, [ranks * n for n in lengths], dtype)
            # The lane of training: sums are formed in the order of entries, as late as space allows.
            while waiting and waiting[0][0] < must_be_done:
                waiting.pop(0)[2].wait()
            ring.wait_until_free(must_be_done, 0)
            for index, operand in enumerate(entry.operands):
                operand.copy_(_operand(number, index, rank, operand.numel(), dtype))
            wide = torch.float32 if dtype == torch.bfloat16 and number % 2 else dtype
            outputs = [torch.full((n,), float("nan"), dtype=wide) for n in lengths]
            waiting.append((number, outputs, ring.reduce_scatter(outputs, entry.operands)))
            for done, results, pending in list(waiting):
                if number - done >= 1:
                    waiting.remove((done, results, pending))
                    pending.wait()
                    pending.wait()
                    for index, output in enumerate(results):
                        wanted = _expected(done, index, rank, ranks, output.numel(), dtype)
                        if not torch.equal(output, wanted.to(output.dtype)):
                            wrong.append(f"{dtype}: entry {done}, operand {index}")
        dist.barrier()
    return wrong


def press_back() -> dict[str, Any]:
    """Rank 0 is fast, and the ring holds two entries; rank 1 adds up the first only when told to."""
    init_gloo()
    turn = Turn()
    numel = 32
    ring = make_ring(2 * entry_bytes([numel * 4]))
    found: dict[str, Any] = {}
    first, result = _enter(ring, 0)
    if dist.get_rank() == 1:
        second, _ = _enter(ring, 1)
        turn.wait_for("rank 0 is stuck")
        time.sleep(0.3)
        first.wait()
        turn.say("added up")
        second.wait()
        _enter(ring, 2)[0].wait()
        return found
    first.wait()
    second, _ = _enter(ring, 1)
    second.wait()
    entry, must_be_done = ring.place(2, [numel], torch.float32)
    found["must be done"] = must_be_done
    found["free at first"] = ring.is_free(must_be_done)
    turn.say("rank 0 is stuck")
    began = time.monotonic()
    ring.wait_until_free(must_be_done, 2)
    found["blocked for"] = time.monotonic() - began
    turn.wait_for("added up")
    found["free then"] = ring.is_free(must_be_done)
    entry.operands[0].fill_(3.0)
    ring.reduce_scatter([result], entry.operands).wait()
    found["sum"] = result.tolist()
    return found


def _enter(ring: GradientRing, number: int) -> tuple[Any, torch.Tensor]:
    entry, must_be_done = ring.place(number, [32], torch.float32)
    ring.wait_until_free(must_be_done, number)
    entry.operands[0].fill_(float(number + 1))
    output = torch.empty(16)
    return ring.reduce_scatter([output], entry.operands), output


Entry = tuple[int, list[int], torch.dtype]


def mix_up(*, entries: tuple[list[Entry], list[Entry]]) -> list[str]:
    """Ranks 0 and 1 enter different things; says how each entry went."""
    init_gloo()
    ring = make_ring(4096, timeout_s=1.0)
    found = []
    for unit, lengths, dtype in entries[dist.get_rank()]:
        entry, must_be_done = ring.place(unit, [2 * n for n in lengths], dtype)
        ring.wait_until_free(must_be_done, unit)
        for operand in entry.operands:
            operand.fill_(1.0)
        outputs = [torch.zeros(n, dtype=dtype) for n in lengths]
        found.append(told(ring.reduce_scatter(outputs, entry.operands).wait))
    dist.barrier()
    return found
