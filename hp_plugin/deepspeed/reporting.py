"""What the adapter says to a person, on rank 0, through the logger of the package."""

from __future__ import annotations

import logging

from hp_plugin.host.reporting import show_log

__all__ = ["say", "show_log"]

_LOG = logging.getLogger("hp_plugin")


def say(line: str) -> None:
    """Log `line`, which rank 0 shows, or the handlers that a framework has put on the logger."""
    _LOG.info(line)
