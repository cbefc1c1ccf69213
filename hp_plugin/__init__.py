"""hp_plugin: topology-aware FSDP for training on clusters of two speeds, in PyTorch, Megatron-LM and DeepSpeed.

Importing it imports torch and nothing of a host framework, initialises no device and changes no global state.
"""

from __future__ import annotations

from hp_plugin import _torch as _torch  # first: imports torch, and explains where a device's package keeps it from it
from hp_plugin._version import __version__
from hp_plugin.core.dtensor import ShardingPlan, apply_plan, simulate, validate
from hp_plugin.core.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from hp_plugin.core.muon import HyperMuon
from hp_plugin.core.optim import HyperAdamW, clip_grad_norm_
from hp_plugin.core.topology import Topology, build_mesh
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError

__all__ = [
    "CPUOffloadPolicy",
    "ConfigurationError",
    "FSDPModule",
    "HyperAdamW",
    "HyperMuon",
    "HyperParallelError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingPlan",
    "Topology",
    "UnsupportedError",
    "__version__",
    "apply_plan",
    "build_mesh",
    "clip_grad_norm_",
    "fully_shard",
    "simulate",
    "validate",
]
