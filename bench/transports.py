"""Which transport an engine of ours really uses, read from its own objects."""

from __future__ import annotations

from hp_plugin.core.fsdp.root import Root


def transport_of(root: Root) -> str:
    """What moves bytes inside a supernode under `root`: "shm", "c10d", or "none" where no unit communicates.

    It is settled by the first gather of the root.
    """
    used = {unit.describe()["transport"] for unit in root.units if unit.communicates}
    return ", ".join(sorted(used)) or "none"
