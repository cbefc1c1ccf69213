"""Ends what a test session left behind, however the session ended.

Runs as `python -m tests.support.reaper MARKER START_TIME DIRECTORY` with a pipe on standard input whose other end only
pytest holds. When pytest ends, even by SIGKILL, the kernel closes the pipe; then every process that carries the
session's marker is killed, and the session's shared memory and temporary directory are removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from tests.support.processes import end_marked_processes, remove_shared_memory


def main(marker: str, started: float, directory: str) -> None:
    """Wait for end of file on standard input, then clean up."""
    os.chdir("/")
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    end_marked_processes(marker)
    remove_shared_memory(since=started)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
