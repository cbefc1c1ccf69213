"""How bytes move inside a supernode and between supernodes."""

from __future__ import annotations

from hp_plugin.core.transport.c10d import C10dTransport, Pending

__all__ = ["C10dTransport", "Pending"]
