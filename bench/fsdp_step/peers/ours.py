"""This project's `fully_shard` and `HyperAdamW`."""

from __future__ import annotations

from typing import Any

import torch

import hp_plugin
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant, take_options
from bench.transports import transport_of
from hp_plugin.core.fsdp.root import Root, unit_of
from hp_plugin.core.kernels import native_status
from hp_plugin.core.layout import local_tensor

OPTIONS: dict[str, Any] = {
    "transport": "auto",
    "residence": "private",
    "reshard_after_forward": None,
    "bucket_bytes": None,
    "window": None,
    "prefetch": None,
}


class Ours(Variant):
    """Every block, the embedding and the head are a unit; the root is one more, without parameters."""

    def __init__(self, context: Context, options: Options) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        model = context.model()
        for unit in [*model.units, model]:
            hp_plugin.fully_shard(unit, mesh=context.mesh, **given)
        self.module = model
        self.optimizer = hp_plugin.HyperAdamW(
            model.parameters(), lr=context.learning_rate, weight_decay=context.weight_decay, fused=True
        )
        self.norm_group = context.shard_group

    @property
    def root(self) -> Root:
        """The engine's root object."""
        self.module.fsdp_counters()  # type: ignore[operator]  # connects the units to a root where no forward has done so
        unit = unit_of(self.module)
        assert unit is not None
        return unit.root

    def local_gradients(self) -> list[torch.Tensor]:
        """The shards."""
        return [local_tensor(p.grad) for p in self.module.parameters() if p.grad is not None]

    def facts(self) -> dict[str, Any]:
        """Transport and buckets in use, and the engine's counters since the last call, which resets them."""
        root = self.root
        counters = root.counters
        facts = {
            "transport": transport_of(root),
            "buckets": len(root.pipeline.buckets),
            "largest_bucket_bytes": max((bucket.num_bytes for bucket in root.pipeline.buckets), default=0),
            "messages_between_supernodes": counters.all_reduces,
            "waits_ms": {cause: round(wait.seconds * 1e3, 3) for cause, wait in counters.waits.items()},
        }
        counters.reset()
        return facts


def build_ours(context: Context, options: Options) -> Variant:
    """Ours, with the options of `fully_shard`."""
    return Ours(context, take_options("hyperfsdp", options, **OPTIONS))


def build_ours_c10d(context: Context, options: Options) -> Variant:
    """Ours on the c10d transport, with the options of `fully_shard` otherwise."""
    return Ours(context, take_options("ours_c10d", {**options, "transport": "c10d"}, **OPTIONS))


def build_ours_aliased(context: Context, options: Options) -> Variant:
    """Ours on shared memory, with shards that are slices of the shared parameters."""
    status = native_status()
    if status.library is None:
        raise PeerUnavailableError(f"shared memory needs the native library: {status.reason.rstrip('.')}")
    given = {**options, "transport": "shm", "residence": "aliased"}
    return Ours(context, take_options("ours_aliased", given, **OPTIONS))
