"""Which transport an engine of ours really uses, read from its own objects."""

from __future__ import annotations

from hp_plugin.core.fsdp.root import Root


def transport_of(root: Root) -> str:
    """Name of what moves bytes inside a supernode under `root`: "c10d"; "none" where no unit communicates."""
    return "c10d" if any(unit.communicates for unit in root.units) else "none"
