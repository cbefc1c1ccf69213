"""What each rank holds of a tensor: mesh axes + placements + global shape -> shapes, offsets and groups of ranks."""

from __future__ import annotations

from hp_plugin.core.layout.attached import AttachedLayout, attach_layout, attached_layout
from hp_plugin.core.layout.layout import Layout, Segment, is_shard, local_tensor

__all__ = ["AttachedLayout", "Layout", "Segment", "attach_layout", "attached_layout", "is_shard", "local_tensor"]
