"""Who must be told before a parameter is written in place: those who share its memory with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_ATTRIBUTE = "_hyperfsdp_before_update"


def watch_updates(parameter: torch.Tensor, before_update: Callable[[], None]) -> None:
    """Has `before_update` called before `parameter` is written by those who announce it. One callable for each."""
    setattr(parameter, _ATTRIBUTE, before_update)


def announce_update(parameters: Iterable[torch.Tensor]) -> None:
    """Tells who watches any of `parameters` that they are about to be written in place, each watcher once.

    Optimizers of this package call it before a step. It may wait for other ranks of the shard group, and returns at
    once where nobody watches.
    """
    watchers = [getattr(parameter, _ATTRIBUTE, None) for parameter in parameters]
    for watcher in dict.fromkeys(watchers):
        if watcher is not None:
            watcher()
