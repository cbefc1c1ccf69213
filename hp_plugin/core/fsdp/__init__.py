"""Fully sharded data parallelism over a two-tier mesh: units, storage, hooks, reduction. See docs/fsdp.md."""

from __future__ import annotations

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.fully_shard import fully_shard
from hp_plugin.core.fsdp.module import FSDPModule, UnshardHandle
from hp_plugin.core.fsdp.phase import IllegalPhaseError, Phase
from hp_plugin.core.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "Counters",
    "FSDPModule",
    "IllegalPhaseError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Phase",
    "UnshardHandle",
    "fully_shard",
]
