"""Multi-process tests on gloo: fast, bounded in time, and leaving nothing behind.

`run_ranks(nprocs, fn, **kwargs)` runs an importable function on every rank of a freshly forked job and returns the
results by rank. `init_gloo()` is what such a function calls first when it needs a process group.
"""

from __future__ import annotations

from tests.support.gloo import init_gloo
from tests.support.ranks import RankReport, RanksFailedError, run_ranks

__all__ = ["RankReport", "RanksFailedError", "init_gloo", "run_ranks"]
