"""Layout-driven distributed Muon: every matrix orthogonalized once, with the fewest bytes that its sharding allows."""

from __future__ import annotations

from hp_plugin.core.muon.blocks import Block, MatrixView, Split
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.optimizer import HyperMuon
from hp_plugin.core.muon.options import MuonOptions
from hp_plugin.core.muon.plan import ExchangePlan

__all__ = [
    "Block",
    "Distribution",
    "ExchangePlan",
    "HyperMuon",
    "MatrixView",
    "MuonCounters",
    "MuonOptions",
    "Split",
]
