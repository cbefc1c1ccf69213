"""What each rank holds of a tensor: mesh axes + placements + global shape -> shapes, offsets and groups of ranks."""

from __future__ import annotations

from hp_plugin.core.layout.layout import Layout, Segment, is_shard, local_tensor
from hp_plugin.core.layout.updates import announce_update, watch_updates

__all__ = ["Layout", "Segment", "announce_update", "is_shard", "local_tensor", "watch_updates"]
