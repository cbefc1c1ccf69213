"""What is compared: the same model plain, under torch FSDP2 and under this project's `fully_shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hp_plugin
from bench.host_overhead.model import Size, make_model

WORLD_SIZE = 8
MESHES: dict[str, tuple[int, ...]] = {"fsdp_8": (8,), "hsdp_2x4": (2, 4)}
"""Name -> shape; two axes are (replicate, shard)."""

Engine = Literal["plain", "fsdp2", "ours"]


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    Attributes:
        engine: What wraps the layers.
        mesh: Key of `MESHES`; empty for the plain model.
        mixed: bf16 compute with fp32 shards and fp32 reduction; the plain model is cast to bf16 as a whole.
    """

    engine: Engine
    mesh: str = ""
    mixed: bool = False

    def __str__(self) -> str:
        return "-".join(filter(None, (self.engine, self.mesh, "bf16" if self.mixed else "fp32")))

    def peer(self, engine: Engine) -> Variant:
        """The variant of `engine` under otherwise equal conditions."""
        return replace(self, engine=engine, mesh="" if engine == "plain" else self.mesh)


def all_variants() -> list[Variant]:
    """Every engine under every condition, engines of one condition side by side."""
    found = []
    for mixed in (False, True):
        found.append(Variant("plain", mixed=mixed))
        for mesh in MESHES:
            found += [Variant("fsdp2", mesh, mixed), Variant("ours", mesh, mixed)]
    return found


@contextlib.contextmanager
def fake_ranks() -> Iterator[dict[str, DeviceMesh]]:
    """A process group of `WORLD_SIZE` ranks of which only this one exists: collectives return at once, unperformed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        meshes = {
            name: init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
            for name, shape in MESHES.items()
        }
        yield meshes | {"tp_8": init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("tp",))}
    finally:
        dist.destroy_process_group()


def build(variant: Variant, meshes: dict[str, DeviceMesh], size: Size) -> nn.Module:
    """The model of `variant`. Every layer is one unit, the root one more without parameters."""
    model = make_model(size)
    if variant.engine == "plain":
        return model.bfloat16() if variant.mixed else model
    shard: Callable[..., Any]
    if variant.engine == "fsdp2":
        shard, policy_class = torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy
    else:
        shard, policy_class = hp_plugin.fully_shard, hp_plugin.MixedPrecisionPolicy  # type: ignore[assignment]
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if variant.mixed else {}
    options: dict[str, Any] = {"mesh": meshes[variant.mesh], "mp_policy": policy_class(**dtypes)}
    for layer in model.layers:
        shard(layer, **options)
    shard(model, **options)
    return model


def make_input(variant: Variant, size: Size) -> torch.Tensor:
    """The model's input. It requires a gradient, as the output of an embedding does."""
    dtype = torch.bfloat16 if variant.mixed else torch.float32
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, size.tokens, size.dim, generator=generator).to(dtype).requires_grad_()
