"""The shell commands that a page of docs/ shows, run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0


@dataclass(frozen=True)
class Page:
    """A page whose commands train, and print losses.

    Attributes:
        path: Below the root of the project.
        loss: What finds a step and its loss in the output, as two groups.
        printed: Relative error of a loss that the output has only so many digits of.
        time_limit_s: For one block of commands, in seconds.
    """

    path: str
    loss: re.Pattern[str]
    printed: float = 5e-6
    time_limit_s: float = 300.0

    def blocks(self) -> list[str]:
        """The blocks of shell commands, in order."""
        text = ROOT.joinpath(self.path).read_text(encoding="utf-8")
        return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    def assert_has(self, *words: str) -> None:
        """Every one of `words` stands in a command of the page."""
        text = "\n".join(self.blocks())
        missing = [each for each in words if each not in text]
        assert not missing, f"no command of {self.path} has {missing}"

    def run(self, commands: str, directory: Path) -> str:
        """Runs commands as a shell would in which the package is installed; what they print. They must succeed.

        What they have started is ended with them, also at the time limit.
        """
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, error = process.communicate(timeout=self.time_limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun's workers are in sessions of their own, which it ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                raise
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{commands}\n{out[-3000:]}\n{error[-3000:]}"
        return out

    def losses(self, output: str) -> dict[int, float]:
        """The losses that a run has printed, by step."""
        return {int(step): float(loss) for step, loss in self.loss.findall(output)}

    def assert_goes_on(
        self,
        reference: dict[int, float],
        resumed: dict[int, float],
        first: int,
        last: int,
        *,
        without: frozenset[int] = frozenset(),
    ) -> None:
        """A resumed run has the steps `first` to `last`, each but `without` with the loss of the reference."""
        assert sorted(resumed) == list(range(first, last + 1))
        for step in set(resumed) - without:
            assert resumed[step] == pytest.approx(reference[step], rel=self.printed)
