"""Runs an unchanged script with an adapter installed, under `python -m` of its package.

[Note: __main__ stays this package] Megatron's checkpointing and data loaders start children with multiprocessing's
*spawn* method, and a spawned child imports the parent's ``__main__`` again. Under ``runpy.run_path`` that would be the
user's script, which would start a second training inside the child. The script's code is therefore executed in the
``__main__`` of ``python -m PACKAGE``: its ``__spec__`` ends in ``.__main__``, which spawn knows to leave alone, while
``__name__ == "__main__"`` holds for the script and what it defines can be pickled in this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from hp_plugin.core.transport.shm import SharedMemoryError
from hp_plugin.errors import HyperParallelError
from hp_plugin.host import reporting

TRACEBACK_VARIABLE = "HP_TRACEBACK"
"""Set to anything to see where a configuration was refused, instead of only the sentence."""


def launch(package: str, install: Callable[[], None]) -> None:
    """Runs the script that ``sys.argv[1]`` names, with the arguments after it.

    Args:
        package: That `python -m` was given.
        install: Puts the adapter in place; called before the script.
    """
    usage = f"usage: python -m {package} SCRIPT [ARGS...]   (under torchrun: torchrun ... -m {package} SCRIPT ...)"
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(f"{usage}\n")
        raise SystemExit(0 if len(sys.argv) > 1 else reporting.USAGE_ERROR)
    script = sys.argv[1]
    if script.startswith("-"):
        reporting.stop(f"expected a script and found the flag {script}; give the script first. {usage}")
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

    Args:
        script: Path of a Python file.
        module: The module whose dictionary the script fills; its ``__spec__`` stays, see
            ``[Note: __main__ stays this package]``.
    """
    script = os.path.abspath(script)
    with open(script, "rb") as file:
        source = file.read()
    # As for "python script.py": its folder comes first on the path. The rest stays, for spawned children too.
    sys.path.insert(0, os.path.dirname(script))
    namespace = module.__dict__
    namespace.update(__file__=script, __package__=None, __doc__=None)
    try:
        exec(compile(source, script, "exec"), namespace)
    except (HyperParallelError, SharedMemoryError) as error:
        # The sentence is the whole message for a user. A failure that only some ranks see is told by those.
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        reporting.stop(str(error), status=1, every_rank=True)
