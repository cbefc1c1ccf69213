"""How units behave around the edges of a training loop, each against the same loop in plain PyTorch."""

from __future__ import annotations

import pytest

from tests.fsdp import behaviour, behaviour_setup
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")

MESHES = [(1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("case", [*behaviour.CASES, *behaviour_setup.CASES], ids=lambda case: case.__name__)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_behaviour(case: behaviour.Case, mesh: tuple[int, int]) -> None:
    run_ranks(mesh[0] * mesh[1], case, replicate=mesh[0], shard=mesh[1])
