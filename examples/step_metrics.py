"""What one rank of ``pretrain_gpt.py --metrics-file FILE`` measures: peak memory, and the traffic of one step.

Each rank appends one JSON line to FILE when training ends:

    {"rank": 0, "peak_bytes": 87654321, "iteration": 5, "intra_bytes": 123, "inter_bytes": 45, "unmodelled": 0}

``peak_bytes`` is the largest resident memory above what the imported libraries took when the script began.
``intra_bytes`` and ``inter_bytes`` are what this rank sent to ranks of its own and of other supernodes from the first
forward pass of that iteration to the first of the next, by the ring model of ``hp_plugin.core.topology``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_plugin.core.topology import Topology, Traffic, TrafficRecorder

ForwardStep = Callable[..., Any]


class StepMetrics:
    """Measures one training run of this rank.

    Args:
        args: Megatron's arguments with those of ``pretrain_gpt.py``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._topology = Topology.from_supernode_size(args.world_size, args.metrics_supernode_size)
        self._recorder: TrafficRecorder | None = None
        self._traffic: Traffic | None = None
        # The kernel keeps the peak per process; 5 resets it to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self._baseline = _status("VmRSS")

    def wrap(self, forward_step: ForwardStep) -> ForwardStep:
        """``forward_step`` that begins and ends the recording."""

        def step(*args: Any, **kwargs: Any) -> Any:
            # curr_iteration counts finished iterations; evaluation does not change it.
            iteration, wanted = self._args.curr_iteration + 1, self._args.metrics_iteration
            if self._recorder is None and self._traffic is None and iteration == wanted:
                self._recorder = TrafficRecorder(self._topology)
                self._recorder.__enter__()
            elif self._recorder is not None and iteration > wanted:
                self._stop()
            return forward_step(*args, **kwargs)

        return step

    def close(self) -> None:
        """Write this rank's line."""
        if self._recorder is not None:  # the recorded iteration was the last one
            self._stop()
        line: dict[str, int] = {"rank": self._args.rank, "peak_bytes": _status("VmHWM") - self._baseline}
        if self._traffic is not None:
            line.update(
                iteration=self._args.metrics_iteration,
                intra_bytes=self._traffic.intra_bytes,
                inter_bytes=self._traffic.inter_bytes,
                unmodelled=sum(self._traffic.unmodelled.values()),
            )
        # One write below the size of a pipe buffer: ranks do not interleave.
        descriptor = os.open(self._args.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)

    def _stop(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        self._traffic, self._recorder = self._recorder.traffic, None


def _status(name: str) -> int:
    """A memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
