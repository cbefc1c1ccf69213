"""The variants, by kind. A module is imported only when its kind is built: some need packages that may be missing."""

from __future__ import annotations

import importlib

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant

BUILDERS: dict[str, str] = {
    "floor": "bench.fsdp_step.peers.floor:build_floor",
    "hyperfsdp": "bench.fsdp_step.peers.ours:build_ours",
    "ours_c10d": "bench.fsdp_step.peers.ours:build_ours_c10d",
    "ours_aliased": "bench.fsdp_step.peers.ours:build_ours_aliased",
    "no_zero_copy": "bench.fsdp_step.ablations:build_no_zero_copy",
    "no_fused_reduce": "bench.fsdp_step.ablations:build_no_fused_reduce",
    "no_pipeline": "bench.fsdp_step.ablations:build_no_pipeline",
    "fsdp2": "bench.fsdp_step.peers.fsdp2:build_fsdp2",
    "fsdp2_tuned": "bench.fsdp_step.peers.fsdp2:build_fsdp2_tuned",
    "fsdp2_hook": "bench.fsdp_step.peers.fsdp2:build_fsdp2_hook",
    "torch_ddp": "bench.fsdp_step.peers.torch_ddp:build_torch_ddp",
    "megatron_ddp": "bench.fsdp_step.peers.megatron:build_megatron_ddp",
    "megatron_distopt": "bench.fsdp_step.peers.megatron:build_megatron_distopt",
    "megatron_fsdp": "bench.fsdp_step.peers.megatron_fsdp:build_megatron_fsdp",
    "deepspeed_zero3": "bench.fsdp_step.peers.deepspeed:build_deepspeed_zero3",
}
"""Kind -> where its builder `(context, options) -> Variant` is."""

ABLATIONS = ("no_zero_copy", "no_fused_reduce", "no_pipeline")
ON_C10D = ("no_zero_copy",)
"""Ablations of the c10d transport, which are held against ours on it."""
NEEDS_MEGATRON = frozenset({"megatron_ddp", "megatron_distopt", "megatron_fsdp"})


def build(kind: str, context: Context, options: Options) -> Variant:
    """Build a variant; every rank must call, in the same order.

    Raises:
        PeerUnavailableError: the peer cannot run here.
        ValueError: it has no such option.
    """
    module, _, name = BUILDERS[kind].partition(":")
    variant: Variant = getattr(importlib.import_module(module), name)(context, options)
    return variant
