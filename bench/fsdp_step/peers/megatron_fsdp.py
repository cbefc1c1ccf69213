"""megatron-fsdp: runs on accelerators alone."""

from __future__ import annotations

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant, take_options


def build_megatron_fsdp(context: Context, options: Options) -> Variant:
    """Says why it cannot be compared here."""
    take_options("megatron_fsdp", options)
    raise PeerUnavailableError("not tried")
