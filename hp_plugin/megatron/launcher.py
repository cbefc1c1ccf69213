"""Runs an unchanged Megatron script with the adapter installed: ``python -m hp_plugin.megatron SCRIPT ARGS...``."""

from __future__ import annotations

from hp_plugin.host.launcher import TRACEBACK_VARIABLE, launch, run_script

__all__ = ["TRACEBACK_VARIABLE", "main", "run_script"]


def main() -> None:
    """Entry point of ``python -m hp_plugin.megatron``; ``sys.argv[1]`` is the script."""

    def install() -> None:
        from hp_plugin.megatron import install

        install()

    launch("hp_plugin.megatron", install)
