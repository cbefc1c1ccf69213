"""What each kind of zygote imports before it forks ranks, and the environment that it needs while importing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

_CORE_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.testing",
    "torch._dynamo",  # the first optimizer step imports it, which costs more than a whole case
)


def preload_core() -> None:
    """Import torch with everything that the core tests use."""
    for name in _CORE_MODULES:
        importlib.import_module(name)


def preload_megatron() -> None:
    """Import torch, the CPU compatibility layer and Megatron, with its training package where that is installed."""
    preload_core()
    compat = importlib.import_module("hp_plugin.megatron.cpu_compat")
    compat.install()
    versions = importlib.import_module("hp_plugin.megatron.releases.versions")
    importlib.import_module("megatron.training" if versions.has_training() else "megatron.core.optimizer")


def preload_deepspeed() -> None:
    """Import torch and DeepSpeed with our adapter in place."""
    preload_core()
    importlib.import_module("hp_plugin.deepspeed")
    importlib.import_module("deepspeed")


@dataclass(frozen=True)
class Flavour:
    """One kind of zygote.

    Attributes:
        preload: called once in the zygote; must not start threads.
        environment: variables set before the zygote's interpreter starts, inherited by its ranks.
    """

    preload: Callable[[], None]
    environment: dict[str, str] = field(default_factory=dict)


FLAVOURS = {
    "core": Flavour(preload_core),
    "megatron": Flavour(preload_megatron, {"HP_DEVICE": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "deepspeed": Flavour(preload_deepspeed, {"DS_ACCELERATOR": "cpu"}),
}
