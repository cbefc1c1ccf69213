"""How bytes move inside a supernode and between supernodes."""

from __future__ import annotations

from hp_plugin.core.transport.c10d import C10dTransport, all_reduce_sum
from hp_plugin.core.transport.lane import Lane, Ticket, lane_of
from hp_plugin.core.transport.owners import (
    allow_gradient_owner,
    allows_gradient_owner,
    gradient_owner,
    set_gradient_owner,
)
from hp_plugin.core.transport.pending import Pending
from hp_plugin.core.transport.updates import announce_update, watch_updates

__all__ = [
    "C10dTransport",
    "Lane",
    "Pending",
    "Ticket",
    "all_reduce_sum",
    "allow_gradient_owner",
    "allows_gradient_owner",
    "announce_update",
    "gradient_owner",
    "lane_of",
    "set_gradient_owner",
    "watch_updates",
]
