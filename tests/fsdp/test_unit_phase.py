"""The phases of a unit and what may follow what."""

from __future__ import annotations

import itertools

import pytest

from hp_plugin.core.fsdp import IllegalPhaseError, Phase
from hp_plugin.core.fsdp.phase import check_transition

TRAINING = [Phase.SHARDED, Phase.GATHERING, Phase.UNSHARDED, Phase.FORWARD, Phase.UNSHARDED, Phase.SHARDED]
BACKWARD = [Phase.SHARDED, Phase.GATHERING, Phase.UNSHARDED, Phase.BACKWARD, Phase.SHARDED]
KEPT_AFTER_FORWARD = [Phase.FORWARD, Phase.UNSHARDED, Phase.BACKWARD, Phase.SHARDED]
UNUSED_PREFETCH = [Phase.SHARDED, Phase.GATHERING, Phase.SHARDED]


@pytest.mark.parametrize("path", [TRAINING, BACKWARD, KEPT_AFTER_FORWARD, UNUSED_PREFETCH])
def test_the_paths_of_training_are_allowed(path: list[Phase]) -> None:
    for before, after in itertools.pairwise(path):
        check_transition("layers.0", before, after, "hook")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Phase.SHARDED, Phase.FORWARD),
        (Phase.SHARDED, Phase.BACKWARD),
        (Phase.SHARDED, Phase.UNSHARDED),
        (Phase.GATHERING, Phase.FORWARD),
        (Phase.GATHERING, Phase.BACKWARD),
        (Phase.FORWARD, Phase.GATHERING),
        (Phase.BACKWARD, Phase.GATHERING),
    ],
)
def test_an_illegal_transition_names_unit_hook_and_phases(before: Phase, after: Phase) -> None:
    with pytest.raises(IllegalPhaseError, match=rf"layers\.7: pre-forward .*{before.name} to {after.name}"):
        check_transition("layers.7", before, after, "pre-forward")
