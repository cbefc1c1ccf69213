"""A segment: memory that the ranks of a shard group share. It has no name, so nothing of it can be left behind.

The first rank of the group makes a memory file (memfd) and hands its descriptor to the others over an abstract Unix
socket with a random name. Both vanish with their processes, however these end. A socket of this kind is visible within
a network namespace only, so ranks that can open it share a host; and only processes of the same user that know the
token, which the ranks exchange through their process group, are served.

Every rank allocates the pages that it will write (first touch, so that they lie in the memory of its own NUMA node)
before it goes on. A shortage is thus an error at start, alike on all ranks, and not a bus error in a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hp_plugin.core.kernels import load_native
from hp_plugin.core.transport.shm.errors import PeerError, SharedMemoryError, named
from hp_plugin.core.transport.shm.memory import mebibytes, shortage

_HANDSHAKE_TIMEOUT_S = 60.0
_TOKEN_BYTES = 16
_STRANGERS = 64
"""So many processes that are none of ours may connect first before a rank finds the queue full."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of a socket's peer

_NEEDS_NATIVE = "shared memory needs the native library; `hp-plugin doctor` says why it is missing"

T = TypeVar("T")


def agree(group: dist.ProcessGroup, value: T, *, problem: str | None = None) -> list[T]:
    """Exchanges a value and a problem among the ranks of `group`. Every rank of it must call.

    Args:
        group: The group.
        value: Anything that can be pickled.
        problem: What went wrong on this rank, as a sentence without a full stop.

    Returns:
        The values of all ranks, in order.

    Raises:
        SharedMemoryError: A rank has a problem. On all ranks, with the first one's.
        PeerError: A rank ended, or did not follow within the timeout of the group.
    """
    gathered: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(gathered, (value, problem), group=group)
    except RuntimeError as error:
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        raise PeerError(
            f"rank {dist.get_rank()} waited for {named(group, others)} to set up shared memory, before the first "
            f"gather of a model{', and one of them' if len(others) > 1 else ', which'} has ended, has failed, or does "
            f"not follow ({str(error).splitlines()[0]})"
        ) from error
    for index, (_, trouble) in enumerate(gathered):
        if trouble is not None:
            raise SharedMemoryError(f"{named(group, [index])}: {trouble}")
    return [each for each, _ in gathered]


class Segment:
    """Memory mapped by every rank of a group.

    Args:
        group: The group. Every rank of it must make the segment, at the same place in its program.
        nbytes: Its size, alike on all ranks.
        owned: (start, end) in bytes of what this rank allocates. Those of all ranks must cover what is used.

    Raises:
        SharedMemoryError: It cannot be had, alike on all ranks: memory or a user limit does not suffice, or the ranks
            are not processes of one host and user.
        PeerError: A rank ended, or did not follow.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, *, owned: Iterable[tuple[int, int]]) -> None:
        library = load_native()
        agree(group, None, problem=None if library is not None else _NEEDS_NATIVE)
        assert library is not None
        self.native = library.functions
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.nbytes = _whole_pages(nbytes)
        self._file = _share_file(group, self.nbytes)
        self._close = weakref.finalize(self, os.close, self._file)
        step = _Step("mapping and allocating", self.nbytes)
        with step:
            self._map = mmap.mmap(self._file, self.nbytes)
            _allocate(self._map, self._file, owned)
            # The kernel holds it for as long as this process lives: that is how the others know.
            if failure := self.native.hp_life_begin(self._file, self.rank):
                raise OSError(failure, os.strerror(failure))
        try:
            agree(group, None, problem=step.problem)
        except (SharedMemoryError, PeerError):
            self._close()
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The `numel` elements from byte `offset` on, 1-D. The memory lives as long as any such tensor."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def is_alive(self, rank: int) -> bool:
        """Whether the process of `rank` (in the group), another one than this, still runs."""
        return self.native.hp_life_is_held(self._file, rank) != 0


# ---- handing the file around ----------------------------------------------------------------------------------------


def _share_file(group: dist.ProcessGroup, nbytes: int) -> int:
    """A descriptor of one memory file of `nbytes` on every rank of `group`."""
    is_first = group.rank() == 0
    with contextlib.ExitStack() as undo:
        file, name, token = -1, b"", b""
        step = _Step("making", nbytes)
        with step:
            if (short := shortage(nbytes)) is not None:
                raise MemoryError(short)
            channel = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            channel.settimeout(_HANDSHAKE_TIMEOUT_S)
            if is_first:
                file = _new_file(nbytes)
                undo.callback(os.close, file)
                name = b"\0hyperfsdp-" + secrets.token_hex(16).encode()
                token = secrets.token_bytes(_TOKEN_BYTES)
                channel.bind(name)
                channel.listen(group.size() + _STRANGERS)
        name, token = agree(group, (name, token), problem=step.problem)[0]
        step = _Step("reaching the first rank of the group for", nbytes)
        with step:
            if not is_first:
                channel.connect(name)
                channel.sendall(token)
        agree(group, None, problem=step.problem)
        step = _Step("handing over", nbytes)
        with step:
            if is_first:
                with channel:  # closed also where this fails: who waits for the descriptor then hears of it
                    _hand_out(channel, file, token, count=group.size() - 1)
            else:
                file = _receive(channel)
                undo.callback(os.close, file)
        agree(group, None, problem=step.problem)
        channel.close()
        undo.pop_all()
        return file


def _new_file(nbytes: int) -> int:
    file = os.memfd_create("hyperfsdp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def _hand_out(listener: socket.socket, file: int, token: bytes, *, count: int) -> None:
    """Sends `file` to `count` ranks. Each has connected and sent the token; others may have connected too."""
    while count:
        connection, _ = listener.accept()
        with connection:
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(packed)[1] != os.geteuid() or not _has_sent(connection, token):
                continue  # not one of ours: whoever is in the network namespace can see the name and connect
            socket.send_fds(connection, [b"f"], [file])
            count -= 1


def _has_sent(connection: socket.socket, token: bytes) -> bool:
    connection.setblocking(False)
    try:
        return secrets.compare_digest(connection.recv(len(token)), token)
    except OSError:
        return False  # nothing has come, and what a rank sends is there by now
    finally:
        connection.settimeout(_HANDSHAKE_TIMEOUT_S)


def _receive(connection: socket.socket) -> int:
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise ConnectionError("no descriptor came: raise the user limit on open files (ulimit -n)")
    os.set_inheritable(files[0], False)
    return files[0]


def _allocate(mapping: mmap.mmap, file: int, owned: Iterable[tuple[int, int]]) -> None:
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)  # where the kernel is set to grant it for shared memory
    for start, end in _page_ranges(owned):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(file, start, end - start)  # an older kernel: allocated here, cleared when touched


def _page_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that `ranges` touch, as few and ascending ranges."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        start, end = start // mmap.PAGESIZE * mmap.PAGESIZE, _whole_pages(end)
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


# ---- failing together -----------------------------------------------------------------------------------------------


class _Step:
    """Keeps what goes wrong inside as a problem for `agree`, so that every rank hears of it before any goes on.

    Args:
        doing: What is done inside, for the message.
        nbytes: Size of the segment.
    """

    def __init__(self, doing: str, nbytes: int) -> None:
        self.problem: str | None = None
        self._doing, self._size = doing, f"{mebibytes(nbytes)} of shared memory"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, MemoryError) and error.args:
            self.problem = f"{self._size} are needed, but {error}"
        elif isinstance(error, (OSError, MemoryError, ValueError)):
            hint = _HINTS.get(getattr(error, "errno", None) or 0, "")
            self.problem = f"{self._doing} {self._size} failed with {type(error).__name__}: {error}{hint}"
        return self.problem is not None


_HINTS = {
    errno.EFAULT: "; memory does not suffice",
    errno.EMFILE: "; raise the user limit on open files (ulimit -n)",
    errno.EFBIG: "; raise the user limit on file sizes (ulimit -f)",
    errno.ENOMEM: "; memory does not suffice, or the user limit on address space (ulimit -v) is too low",
    errno.ENOSPC: "; memory does not suffice",
    errno.ECONNREFUSED: "; the ranks of the group do not share a network namespace, so they are not one host",
}
