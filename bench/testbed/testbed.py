"""`Testbed`: supernodes on one machine, with a slow link between them, for as long as a `with` block lasts."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.errors import UnavailableError
from bench.testbed import network
from bench.testbed.commands import require_programs, require_root
from bench.testbed.delay import DelayedLink
from bench.testbed.leftovers import remove_leftovers, remove_namespaces
from bench.testbed.names import namespaces, new_prefix
from bench.testbed.network import LinkBytes
from bench.testbed.ranks import RankResult, Ranks, RankSpec, rank_environment
from bench.testbed.signals import EndingSignals

_REPOSITORY = Path(__file__).resolve().parents[2]
_FIRST_PORT = 29500  # free in every new namespace; each run of a testbed takes the next one


class Testbed:
    """Network namespaces, one per supernode, joined by a shaped link. A context manager; needs root and iproute2.

    It is removed however the block ends: normally, by an exception, by SIGTERM, SIGINT or SIGHUP. If this process is
    killed, its ranks die with it, and the next testbed, or `python -m bench clean`, removes the rest. Testbeds do not
    disturb one another. Ranks of one supernode talk over its own address, which never leaves the loopback device and
    is not shaped. /dev/shm is one for all supernodes, so names in it must carry the supernode.

    Args:
        supernodes: number of supernodes. One has no link, so rate and delay then have nothing to act on.
        ranks_per_supernode: ranks in each; ranks are numbered supernode by supernode.
        rate_mbit: rate of each supernode's link in Mbit/s, in each direction; None does not limit it.
        delay_ms: one-way delay in ms. Above 0 a user-space program carries the link, which costs host CPU.

    Raises:
        UnavailableError: on entry, if this process is not root, or the machine lacks a program or a kernel feature.
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    def __init__(
        self,
        *,
        supernodes: int = 2,
        ranks_per_supernode: int = 2,
        rate_mbit: float | None = 1000.0,
        delay_ms: float = 0.0,
    ) -> None:
        if not 1 <= supernodes <= 64 or ranks_per_supernode < 1:
            raise ValueError(
                f"{supernodes} supernodes of {ranks_per_supernode} ranks: expected 1 to 64 of at least 1 rank each"
            )
        if (rate_mbit is not None and rate_mbit <= 0) or delay_ms < 0:
            raise ValueError(
                f"rate {rate_mbit} Mbit/s, delay {delay_ms} ms: the rate must be above 0, the delay not below"
            )
        self.supernodes = supernodes
        self.ranks_per_supernode = ranks_per_supernode
        self.rate_mbit = rate_mbit
        self.delay_ms = delay_ms
        self._prefix = ""
        self._runs = 0
        self._signals = EndingSignals()
        self._link: DelayedLink | None = None
        self._directory: Path | None = None

    @property
    def world_size(self) -> int:
        """Ranks of all supernodes."""
        return self.supernodes * self.ranks_per_supernode

    def describe(self) -> dict[str, Any]:
        """The options and what carries the link, for a report's environment."""
        linked = self.supernodes > 1
        return {
            "supernodes": self.supernodes,
            "ranks_per_supernode": self.ranks_per_supernode,
            "rate_mbit": self.rate_mbit if linked else None,
            "delay_ms": self.delay_ms if linked else None,
            "link": None if not linked else "tun" if self.delay_ms else "veth",
        }

    def __enter__(self) -> Testbed:
        require_root()
        require_programs()
        remove_leftovers()
        self._prefix = new_prefix()
        self._signals.catch()
        try:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{self._prefix}-"))
            self._make_network()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make_network(self) -> None:
        names, switch = self._names(), f"{self._prefix}-switch"
        for name in names:
            network.add_namespace(name)
        if self.supernodes == 1:
            return
        if self.delay_ms > 0:
            assert self._directory is not None
            self._link = DelayedLink(self._directory, rate_mbit=self.rate_mbit, delay_ms=self.delay_ms)
            self._link.start(names)
        else:
            network.connect(names, switch)
            if self.rate_mbit is not None:
                network.shape(names, switch, self.rate_mbit)

    def _names(self) -> list[str]:
        return [f"{self._prefix}-s{index}" for index in range(self.supernodes)]

    def _remove(self) -> None:
        try:
            self._signals.ignore()  # raises if a signal comes at this very moment
        finally:
            self._remove_undisturbed()

    def _remove_undisturbed(self) -> None:
        try:
            if self._link is not None:
                self._link.stop()
                self._link = None
            remove_namespaces([name for name in namespaces() if name.startswith(f"{self._prefix}-")])
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
            self._signals.restore()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        show: bool = True,
    ) -> list[RankResult]:
        """Run `command` as every rank, each in its supernode, and wait for all.

        The ranks see the variables that torchrun sets, GLOO_SOCKET_IFNAME, OMP_NUM_THREADS=1, the repository on
        PYTHONPATH, and a host name per supernode. The first failure ends all of them.

        Args:
            command: program and arguments, usually `[sys.executable, "-m", "module", ...]`.
            env: variables on top of this process's and of those above.
            timeout: limit in seconds for the whole run.
            show: copy rank 0's standard output to this process's while it runs.

        Returns:
            One result per rank, in rank order; all exit codes are 0.

        Raises:
            RanksFailedError: a rank failed or the time was up; carries all results.
        """
        if self._directory is None:
            raise RuntimeError("this testbed is not open: use it as `with Testbed(...) as testbed:`")
        directory = self._directory / f"run{self._runs}"
        directory.mkdir()
        specs = [self._spec(rank, _FIRST_PORT + self._runs, env or {}) for rank in range(self.world_size)]
        self._runs += 1
        ranks = Ranks(specs, command, directory=directory, working=_REPOSITORY)
        try:
            return ranks.wait(timeout, show=sys.stdout if show else None)
        finally:
            ranks.kill()

    def _spec(self, rank: int, port: int, env: Mapping[str, str]) -> RankSpec:
        supernode = rank // self.ranks_per_supernode
        linked = self.supernodes > 1
        base = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": network.DEVICE if linked else "lo",
            "BENCH_LINK_DEVICE": network.DEVICE if linked else "",
        }
        variables = rank_environment(
            base,
            rank=rank,
            world_size=self.world_size,
            local_world_size=self.ranks_per_supernode,
            master=(network.address(0) if linked else "127.0.0.1", port),
        )
        return RankSpec(rank, self._names()[supernode], f"supernode{supernode}", {**variables, **env})

    def link_bytes(self) -> list[LinkBytes]:
        """What crossed the link of each supernode so far, by supernode. Zeros where there is no link."""
        if self.supernodes == 1:
            return [LinkBytes(0, 0)]
        return [network.read_link_bytes(name) for name in self._names()]


def why_unavailable(*, delay: bool = False) -> str | None:
    """The sentence that says why this machine cannot hold a testbed, found by trying; None if it can.

    Args:
        delay: ask for a link with delay, which needs /dev/net/tun and a C++ compiler as well.
    """
    try:
        with Testbed(ranks_per_supernode=1, delay_ms=1.0 if delay else 0.0):
            return None
    except UnavailableError as error:
        return str(error)
