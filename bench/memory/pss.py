"""What processes occupy, shared pages counted once: the proportional set size (PSS) that the kernel keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Sample:
    """PSS of one process at one moment, in bytes.

    Attributes:
        moment: On CLOCK_MONOTONIC, in seconds: one clock for all processes of a machine.
        total: All of it.
        shared: The part in memory files, divided by the processes that map each page.
    """

    moment: float
    total: int
    shared: int


def why_unavailable() -> str | None:
    """Why this machine cannot tell, as a sentence; None where it can."""
    if not _ROLLUP.exists():
        return f"{_ROLLUP} is missing: PSS needs Linux 4.14 or newer"
    return None


def sample() -> Sample:
    """PSS of this process now. The kernel walks all its pages: milliseconds for a gigabyte."""
    moment = time.monotonic()
    fields = {}
    for line in _ROLLUP.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Pss"):
            fields[name] = int(rest.split()[0]) * 1024
    return Sample(moment, total=fields["Pss"], shared=fields.get("Pss_Shmem", 0))


class Sampler:
    """Takes samples of this process on a thread for as long as a `with` block lasts, the first and the last included.

    Args:
        interval_s: Pause between two samples.
    """

    def __init__(self, interval_s: float) -> None:
        self.samples: list[Sample] = []
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pss-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self.samples.append(sample())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.samples.append(sample())

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self.samples.append(sample())


def peak_together(by_process: Sequence[Sequence[Sample]]) -> tuple[int, int]:
    """The largest sum over processes at one moment, and the shared part of it; a sample holds until the next one.

    Args:
        by_process: Samples of each process, at least one, in the order of their moments.
    """
    merged = sorted((one.moment, index, one) for index, own in enumerate(by_process) for one in own)
    latest: dict[int, Sample] = {}
    peak = (0, 0)
    for _, index, one in merged:
        latest[index] = one
        if len(latest) == len(by_process):
            peak = max(peak, (sum(s.total for s in latest.values()), sum(s.shared for s in latest.values())))
    return peak
