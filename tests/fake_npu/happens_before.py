"""Is every two uses of memory that must not run at once ordered by streams and events?

The log of the fake device says in which order the host asked for work. On a real device the work of two streams runs
in any order that events do not forbid. Each stream has a vector clock: how far into every other stream what it queues
next is known to come after. An event carries the clock of the moment of its record, waiting for it joins clocks.

Rules, each named in the faults that `check` returns:

unordered   two uses of overlapping bytes on two streams, one of them a write, and neither is known to come after the
            other: a read before the collective that fills the buffer, a write under one that still reads it.
reused      memory is given back while a stream other than the one that allocated it still uses it, and that one
            stream allocates again before it is ordered behind that use: the caching allocator of a device hands it the
            same bytes. What `record_stream` was told about is exempt as far as that stream has come.
slow link   in backward, the computing stream or the host waits for a collective between supernodes, outside the one
            wait that is counted, the window.

Backward is what lies between the marks `BACKWARD` and `END_OF_BACKWARD`; a counted wait between `WINDOW` and `RESUME`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

BACKWARD, END_OF_BACKWARD, WINDOW, RESUME = "backward", "end of backward", "window", "resume"
COMPUTE = 0
_HOST = -1

Clock = dict[int, int]
Entry = tuple[str, int, int, int, int, str]
"""Kind, stream, address of a storage or number of an event, first byte, end, name of kernel, collective or mark."""


@dataclass(frozen=True)
class Fault:
    """A breach of a rule.

    Attributes:
        rule: "unordered", "reused" or "slow link".
        text: Who and what.
    """

    rule: str
    text: str


@dataclass(frozen=True)
class _Use:
    stream: int
    time: int
    start: int
    end: int
    is_write: bool
    name: str
    position: int

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} of {self.name} on stream {self.stream} (entry {self.position})"


@dataclass
class _Memory:
    owner: int | None = None
    uses: list[_Use] = field(default_factory=list)
    kept_for: set[int] = field(default_factory=set)


def check(log: Iterable[Entry], *, inter: Collection[int]) -> list[Fault]:
    """Every breach of a rule in a log.

    Args:
        log: As the fake device gives it.
        inter: Streams of collectives between supernodes.
    """
    checker = _Checker(frozenset(inter))
    for position, entry in enumerate(log):
        checker.take(position, *entry)
    return checker.faults


class _Checker:
    def __init__(self, inter: frozenset[int]) -> None:
        self.faults: list[Fault] = []
        self._inter = inter
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._given_back: dict[int, list[_Use]] = {}
        """By the stream that allocated it: uses of memory that it may get again."""
        self._is_backward = self._is_counted = False

    def take(self, position: int, kind: str, stream: int, subject: int, start: int, end: int, name: str) -> None:
        if kind == "allocate":
            self._memory[subject] = _Memory(owner=stream)
            self._reuse(position, stream)
        elif kind == "free":
            self._free(self._memory.pop(subject, _Memory()))
        elif kind in ("read", "write"):
            self._use(position, stream, subject, start, end, kind == "write", name)
        elif kind == "keep for stream":
            self._memory.setdefault(subject, _Memory()).kept_for.add(stream)
        elif kind == "no longer for stream":
            self._memory.setdefault(subject, _Memory()).kept_for.discard(stream)
        elif kind == "record":
            self._events[subject] = dict(self._now(stream))
        elif kind == "wait":
            self._join(position, stream, self._events.get(subject, {}))
        elif kind == "host sees event":  # a query, which waits for nothing
            _merge(self._now(_HOST), self._events.get(subject, {}))
        elif kind == "host waits for event":
            self._join(position, _HOST, self._events.get(subject, {}))
        elif kind == "host waits for stream":
            self._join(position, _HOST, self._now(stream))
        elif kind == "host waits for device":
            for each in list(self._clocks):
                self._join(position, _HOST, self._now(each))
        elif kind == "mark":
            self._is_backward = name == BACKWARD or (self._is_backward and name != END_OF_BACKWARD)
            self._is_counted = name == WINDOW or (self._is_counted and name != RESUME)
        else:
            raise AssertionError(f"unknown entry {kind}")

    def _now(self, stream: int) -> Clock:
        """The clock of a stream. What the host has waited for is done before anything that it queues later."""
        clock = self._clocks.setdefault(stream, {})
        if stream != _HOST:
            _merge(clock, self._clocks.get(_HOST, {}))
        return clock

    def _join(self, position: int, stream: int, other: Clock) -> None:
        clock = self._now(stream)
        late = [each for each in self._inter if other.get(each, 0) > clock.get(each, 0)]
        if late and self._is_backward and not self._is_counted and stream in (COMPUTE, _HOST):
            who = "the host" if stream == _HOST else "the computing stream"
            self.faults.append(Fault("slow link", f"entry {position}: {who} waits for stream {late} in backward"))
        _merge(clock, other)

    def _use(self, position: int, stream: int, address: int, start: int, end: int, is_write: bool, name: str) -> None:
        memory, clock = self._memory.setdefault(address, _Memory()), self._now(stream)
        clock[stream] = clock.get(stream, 0) + 1
        use = _Use(stream, clock[stream], start, end, is_write, name, position)
        for earlier in memory.uses:
            overlaps = earlier.start < end and start < earlier.end
            if overlaps and (is_write or earlier.is_write) and not _is_past(earlier, clock):
                self.faults.append(Fault("unordered", f"{use} beside {earlier}"))
        # What a covering use of the same stream makes superfluous need not be looked at again.
        memory.uses = [e for e in memory.uses if not (e.stream == stream and _covers(use, e))]
        memory.uses.append(use)

    def _free(self, memory: _Memory) -> None:
        if memory.owner is None:
            return  # allocated before the log began, on a stream that it does not know
        kept = [self._now(stream) for stream in memory.kept_for]
        open_uses = [use for use in memory.uses if not any(_is_past(use, clock) for clock in kept)]
        self._given_back.setdefault(memory.owner, []).extend(open_uses)

    def _reuse(self, position: int, stream: int) -> None:
        clock = self._now(stream)
        for use in self._given_back.pop(stream, ()):
            if not _is_past(use, clock):
                text = f"entry {position}: stream {stream} may get memory again that is still under {use}"
                self.faults.append(Fault("reused", text))


def _is_past(use: _Use, clock: Clock) -> bool:
    return clock.get(use.stream, 0) >= use.time


def _covers(use: _Use, earlier: _Use) -> bool:
    return use.start <= earlier.start and earlier.end <= use.end and (use.is_write or not earlier.is_write)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time
