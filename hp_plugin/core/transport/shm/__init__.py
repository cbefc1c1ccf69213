"""Shared memory inside a supernode whose ranks are processes of one host. See docs/shared-memory.md."""

from __future__ import annotations

from hp_plugin.core.transport.shm.errors import PeerError, SharedMemoryError
from hp_plugin.core.transport.shm.ring import GradientRing, RingSlots
from hp_plugin.core.transport.shm.segment import Segment, agree
from hp_plugin.core.transport.shm.signals import Signals

__all__ = ["GradientRing", "PeerError", "RingSlots", "Segment", "SharedMemoryError", "Signals", "agree"]
