"""What the adapter says to a person; see :mod:`hp_plugin.host.reporting`."""

from __future__ import annotations

from hp_plugin.host.reporting import USAGE_ERROR, rank, say, say_here, show_log, stop

__all__ = ["USAGE_ERROR", "rank", "say", "say_here", "show_log", "stop"]
