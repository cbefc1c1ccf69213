"""The process group of a rank function."""

from __future__ import annotations

import datetime


def init_gloo(*, timeout_s: float = 60.0) -> None:
    """Create the default gloo process group from the environment that `run_ranks` prepared.

    Every rank of the case must call it. The store already listens when the ranks start, so no port is ever guessed.

    Args:
        timeout_s: seconds after which a collective raises instead of waiting for a peer.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://", timeout=datetime.timedelta(seconds=timeout_s))
