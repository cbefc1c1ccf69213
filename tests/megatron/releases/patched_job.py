"""Starts a training script on CPU without the launcher: `python patched_job.py SCRIPT ARGS...`, under torchrun.

As at a site that forbids rebinding: nothing of the adapter is installed, Megatron's patched sources call it. Only the
CPU compatibility layer is put in, by hand, since there is no accelerator.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":  # checkpointing starts children that import this file again
    from hp_plugin.megatron import cpu_compat, installation

    cpu_compat.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    taken_over = installation.installed()
    print(f"taken over by {type(taken_over).__name__}", flush=True)
