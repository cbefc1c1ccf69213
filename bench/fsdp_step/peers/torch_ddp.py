"""torch's DistributedDataParallel: a flat ring over all ranks, in buckets that overlap with backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant, take_options

_MIB = 1 << 20


class TorchDDP(Variant):
    """DDP with one bucket size; gradients are views of the buckets."""

    def __init__(self, context: Context, options: Options) -> None:
        self.module = self.ddp = DistributedDataParallel(
            context.model(),
            bucket_cap_mb=options["bucket_bytes"] / _MIB,
            gradient_as_bucket_view=options["gradient_as_bucket_view"],
            static_graph=options["static_graph"],
        )
        self.optimizer = context.adamw(self.module.parameters())

    def local_gradients(self) -> list[torch.Tensor]:
        """All of them."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def facts(self) -> dict[str, Any]:
        """DDP's own account of its buckets, after it has rebuilt them in the order of backward."""
        data = self.ddp._get_ddp_logging_data()
        sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        return {
            "buckets": len([size for size in sizes.split(",") if size.strip()]),
            "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
            "static_graph": bool(data.get("static_graph")),
        }


def build_torch_ddp(context: Context, options: Options) -> Variant:
    """DDP."""
    defaults = {"bucket_bytes": 25 * _MIB, "gradient_as_bucket_view": True, "static_graph": True}
    return TorchDDP(context, take_options("torch_ddp", options, **defaults))
