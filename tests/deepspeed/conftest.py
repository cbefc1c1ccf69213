"""Skips what needs DeepSpeed where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_plugin.deepspeed.versions import is_installed

_WITHOUT_DEEPSPEED = ("test_schema.py", "test_migration.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_installed():
        return
    skip = pytest.mark.skip(reason='DeepSpeed is not installed: DS_BUILD_OPS=0 pip install "hp-plugin[deepspeed]"')
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in _WITHOUT_DEEPSPEED:
            item.add_marker(skip)
