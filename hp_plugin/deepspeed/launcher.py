"""Runs an unchanged DeepSpeed script with the adapter installed: ``python -m hp_plugin.deepspeed SCRIPT ARGS...``."""

from __future__ import annotations

from hp_plugin.deepspeed import install
from hp_plugin.host.launcher import launch


def main() -> None:
    """Entry point of ``python -m hp_plugin.deepspeed``; ``sys.argv[1]`` is the script."""
    launch("hp_plugin.deepspeed", install)
