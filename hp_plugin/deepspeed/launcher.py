"""Runs an unchanged DeepSpeed script with the adapter installed: ``python -m hp_plugin.deepspeed SCRIPT ARGS...``."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from hp_plugin.core.transport.shm import SharedMemoryError
from hp_plugin.deepspeed import install, reporting
from hp_plugin.errors import HyperParallelError

TRACEBACK_VARIABLE = "HP_TRACEBACK"
"""Set to anything to see where a configuration was refused, instead of only the sentence."""

USAGE = (
    "usage: python -m hp_plugin.deepspeed SCRIPT [ARGS...]   "
    "(under torchrun: torchrun ... -m hp_plugin.deepspeed SCRIPT ...)"
)


def main() -> None:
    """Entry point of ``python -m hp_plugin.deepspeed``; ``sys.argv[1]`` is the script."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE, flush=True)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if script.startswith("-"):
        reporting.stop(f"expected a script and found the flag {script}; give the script first. {USAGE}")
    if not os.path.isfile(script):
        reporting.stop(f"the script {script} does not exist (current directory: {os.getcwd()}).")
    sys.argv = sys.argv[1:]
    try:
        install()
    except HyperParallelError as error:
        reporting.stop(str(error))
    run_script(script, sys.modules["__main__"])


def run_script(script: str, module: ModuleType) -> None:
    """Execute ``script`` in the namespace of ``module``, which stands as ``__main__``.

    Its ``__spec__`` stays that of this package's ``__main__``: children that multiprocessing spawns then leave it
    alone, instead of running the script once more.
    """
    script = os.path.abspath(script)
    with open(script, "rb") as file:
        source = file.read()
    sys.path.insert(0, os.path.dirname(script))
    namespace = module.__dict__
    namespace.update(__file__=script, __package__=None, __doc__=None)
    try:
        exec(compile(source, script, "exec"), namespace)
    except (HyperParallelError, SharedMemoryError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        reporting.stop(f"rank {reporting.rank()}: {error}", status=1)
