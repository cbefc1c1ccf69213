"""Runs a plan: brings matrices to their owners, has them orthogonalized, and brings the updates back.

Waves are pipelined. While the matrices of wave k are orthogonalized, the pieces of wave k + 1 are on their way to their
owners and the updates of wave k - 1 on their way back. Every rank issues the same collectives in the same order
whatever gradients it has: a piece travels with a flag that says whether its rank had a gradient, and a matrix for which
no rank had one is neither orthogonalized nor updated.
"""

from __future__ import annotations

import dataclasses

import torch

from hp_plugin.core.muon.communicator import Communicators
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.gram import GramRunner
from hp_plugin.core.muon.plan import ExchangePlan
from hp_plugin.core.muon.waves import Apply, Contribute, Contribution, WaveRunner
from hp_plugin.core.topology import Topology


class Exchanger:
    """Runs the waves of a plan.

    Args:
        plan: The plan. Every rank of each of its domains must construct, in the same order.
        communicators: Where groups come from.
        device: Where messages are made.
        topology: Which ranks share a supernode, for counters.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        communicators: Communicators,
        device: torch.device,
        *,
        topology: Topology | None = None,
    ) -> None:
        self.plan = plan
        self._runners = [
            (GramRunner if wave.mode == "gram" else WaveRunner)(wave, communicators.rank, communicators, device)
            for wave in plan.waves
        ]
        self._last_uses = _last_uses(plan)
        self._messages = MuonCounters(topology)  # the same in every step
        for runner in self._runners:
            self._messages.count_messages(runner.legs, runner.rank, runner.wave)

    def run(self, contribute: Contribute, apply: Apply) -> MuonCounters:
        """One step. Every rank of every domain must call.

        Args:
            contribute: Called once for each parameter, no later than in its last wave; not for those that another
                replica owns alone (`MatrixParameter.in_one_replica`), unless this rank has something to send.
            apply: Called for each piece of this rank once its update is there.

        Returns:
            What was done.
        """
        counters = dataclasses.replace(self._messages)
        kept: dict[int, Contribution] = {}

        def contribution(parameter: int) -> Contribution:
            if parameter not in kept:
                kept[parameter] = contribute(parameter)
            return kept[parameter]

        def start(number: int) -> None:
            self._runners[number].start(contribution)
            for parameter in self._last_uses[number]:
                if not self.plan.parameters[parameter].in_one_replica:
                    contribution(parameter)  # its momentum goes on, although other replicas own its matrices
                kept.pop(parameter, None)

        for number, runner in enumerate(self._runners):
            if number == 0:
                start(0)
            if number + 1 < len(self._runners):
                start(number + 1)
            runner.orthogonalize(counters)
            if number > 0:
                self._runners[number - 1].finish(apply)
        if self._runners:
            self._runners[-1].finish(apply)
        return counters


def _last_uses(plan: ExchangePlan) -> list[list[int]]:
    """For each wave, the parameters of which no later wave has a block."""
    last = {block.parameter: n for n, wave in enumerate(plan.waves) for block in wave.blocks}
    uses: list[list[int]] = [[] for _ in plan.waves]
    for parameter, number in last.items():
        uses[number].append(parameter)
    return uses
