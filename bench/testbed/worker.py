"""What the code of a rank calls inside a testbed."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.testbed.network import LinkBytes


@contextlib.contextmanager
def gloo(*, timeout_s: float = 120.0) -> Iterator[None]:
    """The default process group of the run, for the length of the block; every rank must enter it.

    Ranks leave together: rank 0 holds the store, and a rank that outlives it would fail in it. After an exception
    nobody waits; the testbed ends the peers.

    Args:
        timeout_s: seconds after which a collective raises instead of waiting for a peer.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://", timeout=datetime.timedelta(seconds=timeout_s))
    yield
    dist.barrier()
    dist.destroy_process_group()


def publish(value: Any) -> None:
    """Hand `value`, anything that JSON holds, to the tool: it is the `value` of this rank's `RankResult`."""
    Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(value))


def supernode() -> int:
    """The supernode of this rank."""
    return int(os.environ["GROUP_RANK"])


def link_bytes() -> LinkBytes:
    """What crossed the link of this rank's supernode so far, all its ranks together. Zeros where there is no link.

    Read from /proc/net/dev, which shows the reader's own namespace; /sys would show the one it was mounted in.
    """
    device = os.environ.get("BENCH_LINK_DEVICE")
    if not device:
        return LinkBytes(0, 0)
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            words = counters.split()
            return LinkBytes(sent=int(words[8]), received=int(words[0]))
    raise RuntimeError(f"this process sees no device {device!r}: link_bytes() must be called by a rank of a testbed")
