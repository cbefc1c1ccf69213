"""Skips the folder where DeepSpeed is missing."""

from __future__ import annotations

import pytest

from hp_plugin.deepspeed.versions import is_installed

if not is_installed():
    pytest.skip(
        'DeepSpeed is not installed: pip install "hp-plugin[deepspeed]" (nothing is compiled with DS_BUILD_OPS=0)',
        allow_module_level=True,
    )
