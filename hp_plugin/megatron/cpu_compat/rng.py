"""The "CUDA" random generator is the CPU's default generator, so that seeds and forks of it act on CPU draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hp_plugin.megatron.cpu_compat.patches import Ledger

AREA = "random generator"


def apply(ledger: Ledger) -> None:
    """Replace the generator names of ``torch.cuda``, and the queue for calls before initialization."""
    cuda = torch.cuda
    for owner in (cuda, cuda.random):
        ledger.replace(owner, "manual_seed", _manual_seed, area=AREA)
        ledger.replace(owner, "manual_seed_all", _manual_seed, area=AREA)
        ledger.replace(owner, "get_rng_state", _get_rng_state, area=AREA)
        ledger.replace(owner, "set_rng_state", _set_rng_state, area=AREA)
    ledger.replace(cuda, "default_generators", (torch.default_generator,), area=AREA)
    ledger.replace(cuda, "_lazy_call", _call_now, area=AREA)
    ledger.replace(cuda, "_lazy_init", lambda: None, area=AREA)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    torch.set_rng_state(new_state.cpu())


def _call_now(callback: Callable[[], Any], **kwargs: Any) -> None:
    # CUDA queues such calls until it is initialized, which never happens here.
    callback()
