"""Tests of the engine run on each transport."""

from __future__ import annotations

import pytest

from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE

TRANSPORTS = ("c10d", "shm")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How bytes move inside a supernode in this test: ranks that it starts find it in their environment."""
    chosen = str(request.param)
    monkeypatch.setenv(TRANSPORT_VARIABLE, chosen)
    return chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the shard group has one rank, nothing moves inside a supernode: one transport is enough."""
    items[:] = [item for item in items if not _repeats(item)]


def _repeats(item: pytest.Item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("transport") != TRANSPORTS[-1]:
        return False
    meshes = [value for key, value in params.items() if key in ("mesh", "shape") and isinstance(value, tuple)]
    return any(len(mesh) == 2 and mesh[1] == 1 for mesh in meshes)
