"""Layout-driven distributed Muon: every matrix orthogonalized once, with the fewest bytes that its sharding allows."""

from __future__ import annotations

from hp_plugin.core.muon.blocks import Block, MatrixView, Split
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.optimizer import HyperMuon
from hp_plugin.core.muon.options import MuonOptions
from hp_plugin.core.muon.plan import ExchangePlan
from hp_plugin.core.muon.qk_clip import QKClip
from hp_plugin.core.muon.routing import Routing, route

__all__ = [
    "Block",
    "Distribution",
    "ExchangePlan",
    "HyperMuon",
    "MatrixView",
    "MuonCounters",
    "MuonOptions",
    "QKClip",
    "Routing",
    "Split",
    "route",
]
