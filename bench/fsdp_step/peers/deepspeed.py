"""DeepSpeed ZeRO-3."""

from __future__ import annotations

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant, take_options


def build_deepspeed_zero3(context: Context, options: Options) -> Variant:
    """Says why it cannot be compared here."""
    take_options("deepspeed_zero3", options)
    raise PeerUnavailableError("not tried")
