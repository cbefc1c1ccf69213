"""The variants, by kind. A module is imported only when its kind is built: some need packages that may be missing."""

from __future__ import annotations

import importlib

from bench.fsdp_step.settings import Options
from bench.muon_step.variant import MuonContext, MuonVariant

BUILDERS: dict[str, str] = {
    "hypermuon": "bench.muon_step.peers.ours:build_ours",
    "torch_dtensor": "bench.muon_step.peers.torch_dtensor:build_torch_dtensor",
    "megatron": "bench.muon_step.peers.megatron:build_megatron",
    "deepspeed": "bench.muon_step.peers.deepspeed:build_deepspeed",
}
"""Kind -> where its builder `(context, options) -> MuonVariant` is."""

NEEDS_MEGATRON = frozenset({"megatron"})


def build(kind: str, context: MuonContext, options: Options) -> MuonVariant:
    """Build a variant; every rank must call, in the same order.

    Raises:
        PeerUnavailableError: the peer cannot run here.
        ValueError: it has no such option.
    """
    module, _, name = BUILDERS[kind].partition(":")
    variant: MuonVariant = getattr(importlib.import_module(module), name)(context, options)
    return variant
