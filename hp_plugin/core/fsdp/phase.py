"""The life of a unit as an explicit state machine: an illegal transition names the hook that attempted it."""

from __future__ import annotations

import enum

from hp_plugin.errors import HyperParallelError


class Phase(enum.Enum):
    """What the parameters of a unit are at the moment."""

    SHARDED = "sharded"
    """At rest: the module holds shards, no full tensor is alive."""
    GATHERING = "gathering"
    """All-gather issued into the full tensors, not waited for; the module still holds shards."""
    FORWARD = "forward"
    """The module holds full parameters and its forward runs."""
    UNSHARDED = "unsharded"
    """The module holds full parameters and nothing of it runs: kept after forward, or unshard() by the user."""
    BACKWARD = "backward"
    """The module holds full parameters and gradients are being produced."""


_ALLOWED: dict[Phase, tuple[Phase, ...]] = {
    Phase.SHARDED: (Phase.GATHERING,),
    Phase.GATHERING: (Phase.UNSHARDED, Phase.SHARDED),
    Phase.UNSHARDED: (Phase.FORWARD, Phase.BACKWARD, Phase.SHARDED),
    # FORWARD -> FORWARD: a module that calls itself; FORWARD -> BACKWARD: a forward that runs its own backward
    # (reentrant activation checkpointing inside a unit ends its inner backward while the outer forward is recomputed).
    Phase.FORWARD: (Phase.FORWARD, Phase.UNSHARDED, Phase.BACKWARD, Phase.SHARDED),
    # BACKWARD -> FORWARD: activation checkpointing recomputes the unit's forward inside backward.
    Phase.BACKWARD: (Phase.BACKWARD, Phase.FORWARD, Phase.UNSHARDED, Phase.SHARDED),
}


class IllegalPhaseError(HyperParallelError, RuntimeError):
    """A hook found its unit in a phase in which that hook must not run."""


def check_transition(unit: str, before: Phase, after: Phase, hook: str) -> None:
    """Raises IllegalPhaseError unless `before` -> `after` is allowed.

    Args:
        unit: Name of the unit, for the message.
        before: Phase in which the unit is.
        after: Phase into which `hook` would put it.
        hook: Name of the hook or method that makes the transition.
    """
    if after not in _ALLOWED[before]:
        allowed = ", ".join(sorted(p.name for p in _ALLOWED[before]))
        raise IllegalPhaseError(
            f"unit {unit}: {hook} would take it from {before.name} to {after.name}; from {before.name} only {allowed} "
            "can follow. A module of the unit was probably called outside the forward of its own unit, or a hook of "
            "another library replaced one of ours"
        )
