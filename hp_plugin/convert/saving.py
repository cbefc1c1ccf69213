"""`torch.save` that lets go of what it has written."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import IO, Any

import torch

_LEAVES_CYCLES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8)


def save(value: Any, target: IO[bytes] | Path) -> None:
    """Writes `value` as `torch.save` does, of which nothing stays alive afterwards.

    In torch 2.7 the pickler and the storages that it has written refer to one another, and stay until the collector of
    cycles comes by: dozens of tensors later.
    """
    torch.save(value, target)
    if _LEAVES_CYCLES:
        gc.collect(1)  # the young ones: quick
