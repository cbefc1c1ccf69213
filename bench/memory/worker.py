"""What a rank does: trains every case under both engines and watches its storages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hp_plugin
from bench.memory.cases import MESH, SIZE, Case
from bench.memory.model import Block, Model, make_model
from bench.memory.tracker import StorageTracker

Engine = Literal["ours", "fsdp2"]

_WARM_UP_STEPS = 2
_STEPS = 2
_SKEW_S = 0.01


def measure_all(*, cases: tuple[Case, ...]) -> list[dict[str, int]]:
    """Peak bytes of this rank in every case, by engine. Every rank must call."""
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp_replicate", "dp_shard"))
    return [{engine: peak_of(case, engine, mesh) for engine in ("fsdp2", "ours")} for case in cases]


def peak_of(case: Case, engine: Engine, mesh: DeviceMesh) -> int:
    """Most bytes alive at one moment of a steady step, in bytes."""
    tracker = StorageTracker()
    gc.collect()
    with tracker:
        model = _sharded(case, engine, mesh)
        _slow_down(model, mesh)
        optimizer_class = hp_plugin.HyperAdamW if engine == "ours" else torch.optim.AdamW
        optimizer = optimizer_class(model.parameters(), lr=1e-4, foreach=False)
        tokens = torch.arange(SIZE.tokens)
        for _ in range(_WARM_UP_STEPS):
            _step(case, model, optimizer, tokens)
        dist.barrier()
        tracker.reset_peak()
        for _ in range(_STEPS):
            _step(case, model, optimizer, tokens)
    return tracker.peak


def activation_bytes(*, mixed: bool) -> int:
    """Bytes that the unsharded model has saved at the end of its forward."""
    model = make_model(SIZE)
    if mixed:
        model = model.bfloat16()
    tracker = StorageTracker()
    tracker.track(model.parameters())
    before = tracker.current
    with tracker:
        loss = model(torch.arange(SIZE.tokens))
        after = tracker.current
    del loss
    return after - before


def _sharded(case: Case, engine: Engine, mesh: DeviceMesh) -> Model:
    model = make_model(SIZE)
    shard: Callable[..., Any] = torch_fsdp.fully_shard if engine == "fsdp2" else hp_plugin.fully_shard
    policy: Any = torch_fsdp.MixedPrecisionPolicy if engine == "fsdp2" else hp_plugin.MixedPrecisionPolicy
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.mixed else {}
    options = {"mesh": mesh, "mp_policy": policy(**dtypes), **(case.options if engine == "ours" else {})}
    for block in model.blocks:
        shard(block, reshard_after_forward=case.reshard, **options)
    shard(model, **options)
    return model


def _slow_down(model: Model, mesh: DeviceMesh) -> None:
    """Makes one rank of each shard group late in every block's backward.

    What the others have sent to it is then in flight for as long as they may let it be: the worst case, every time.
    """
    if mesh.get_local_rank("dp_shard") == 0:
        return
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up.register_full_backward_pre_hook(_be_late)


def _be_late(_module: nn.Module, _gradient: Any) -> None:
    time.sleep(_SKEW_S)


def _step(case: Case, model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    for index in range(case.micro_batches):
        is_last = index == case.micro_batches - 1
        if case.accumulation == "all_reduce_last":
            model.set_requires_all_reduce(is_last)
        if case.accumulation == "sync_last":
            model.set_requires_gradient_sync(is_last)
        model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
