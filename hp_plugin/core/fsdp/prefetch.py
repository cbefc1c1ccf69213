"""Gathering units ahead of their use, in the order of the pass before, within a budget of bytes.

A pass is one forward of the root or one backward. Every pass records in which order it enters the units, and the next
pass of its kind prefetches along that order: where it enters unit i, the gathers of the units after i are issued while
the bytes gathered and not yet used stay within the budget. Hooks run alike on all ranks, since every unit that is
entered is gathered by all of them; so all ranks prefetch alike.

A pass that leaves the recorded order loses prefetches, never correctness: a unit that was not prefetched is gathered
where it is entered, one that was prefetched in vain is resharded at the end of the pass, and the pass after follows
the new order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hp_plugin.core.fsdp.phase import Phase

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.unit import Unit


class PassOrder:
    """The order of units in one kind of pass."""

    def __init__(self) -> None:
        self._recorded: list[Unit] = []
        self._entered: list[Unit] = []
        self._position = 0

    @property
    def recorded(self) -> Sequence[Unit]:
        """Units in the order of the last complete pass, a unit that was used twice twice."""
        return self._recorded

    def begin(self, guess: Iterable[Unit] = ()) -> None:
        """A pass begins. `guess` stands for the order as long as no pass has been recorded."""
        self._recorded = self._recorded or list(guess)
        self._entered = []
        self._position = 0

    def enter(self, unit: Unit) -> Sequence[Unit]:
        """The pass enters `unit`. Returns what comes after it; nothing where the pass has left the recorded order."""
        if not self._entered or self._entered[-1] is not unit:
            self._entered.append(unit)
            try:
                self._position = self._recorded.index(unit, self._position) + 1
            except ValueError:
                return ()
        return self._recorded[self._position :]

    def end(self) -> None:
        """The pass is complete: the next one follows its order."""
        self._recorded = self._entered


class Prefetcher:
    """Issues the gathers of one root ahead of their use.

    Args:
        budget: Bytes of full parameters that may be gathered and not yet used. One unit may be, whatever its size,
            unless it is 0: then none.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.forward = PassOrder()
        self.backward = PassOrder()
        self._ahead: list[Unit] = []

    def begin_backward(self) -> None:
        """A backward begins. The first one is expected to run in the reverse order of forward, inside the root."""
        forward = self.forward.recorded
        self.backward.begin([*forward[:1], *reversed(forward[1:])])

    def before_forward(self, unit: Unit, *, is_training: bool) -> None:
        """The forward of `unit` is about to run; it has been gathered.

        Args:
            unit: The unit.
            is_training: Whether this is part of a forward of the root with gradients enabled. Others follow lists only.
        """
        upcoming = self.forward.enter(unit) if is_training else ()
        if unit.forward_prefetch is None:
            self._fill(upcoming)
        else:
            self._gather(unit.forward_prefetch)

    def before_backward(self, unit: Unit) -> None:
        """Backward enters `unit`, to differentiate it or to recompute its forward first; it has been gathered."""
        upcoming = self.backward.enter(unit)
        if unit.backward_prefetch is None:
            self._fill(upcoming)
        else:
            self._gather([u for u in unit.backward_prefetch if u.outstanding_forwards > 0])

    def _fill(self, upcoming: Iterable[Unit]) -> None:
        """Gathers what comes next as far as the budget goes."""
        if self.budget == 0:
            return
        self._ahead = [unit for unit in self._ahead if unit.phase is Phase.GATHERING]
        used = sum(unit.full_bytes for unit in self._ahead)
        for unit in upcoming:
            if unit.phase is not Phase.SHARDED or not unit.communicates:
                continue
            if self._ahead and used + unit.full_bytes > self.budget:
                return
            self._gather([unit])
            used += unit.full_bytes

    def _gather(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.phase is Phase.SHARDED:
                unit.unshard("prefetch")
                self._ahead.append(unit)

    def release(self, hook: str) -> None:
        """End of a pass: reshards what was gathered ahead and not used."""
        ahead, self._ahead = self._ahead, []
        for unit in ahead:
            if unit.phase is Phase.GATHERING:
                unit.reshard(hook)
