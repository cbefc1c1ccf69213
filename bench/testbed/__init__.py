"""Two tiers of network on one machine: a network namespace per supernode, and a shaped link between them.

`Testbed` makes, uses and removes them. `bench.testbed.worker` is what the code of a rank calls inside one.
"""

from __future__ import annotations

from bench.testbed.network import LinkBytes
from bench.testbed.options import DelayOption, LinkOption, RanksOption, SupernodesOption, parse_rate
from bench.testbed.ranks import RankResult, RanksFailedError
from bench.testbed.testbed import Testbed, why_unavailable

__all__ = [
    "DelayOption",
    "LinkBytes",
    "LinkOption",
    "RankResult",
    "RanksFailedError",
    "RanksOption",
    "SupernodesOption",
    "Testbed",
    "parse_rate",
    "why_unavailable",
]
