"""What a `torch_dist` checkpoint has of `HyperMuon`, and what becomes of the state of another optimizer.

Every tensor has the key of its weight: `optimizer.state.momentum_buffer.<weight>` for Muon's parameters,
`optimizer.state.exp_avg.<weight>` and `exp_avg_sq` for AdamW's. Who owns a matrix is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hp_plugin.core.muon import HyperMuon


@contextmanager
def shared_momentum(muon: HyperMuon, *, is_loading: bool) -> Iterator[None]:
    """Within it, all replicas have the momentum that one of them keeps. Every rank must enter."""
    yield


def describe(owner: Any, described: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """The description of an optimizer's state, with the keys that are right for Muon."""
    inner = described.get("optimizer", described)
    for group in inner["param_groups"]:
        group.pop("param_names", None)
    return described


def adapted(owner: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict


def load_inner(owner: Any, inner: dict[str, Any]) -> None:
    raise NotImplementedError
