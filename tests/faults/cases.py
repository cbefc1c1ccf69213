"""Rank functions of the fault tests."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_plugin import HyperAdamW, HyperParallelError, Topology, fully_shard
from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from hp_plugin.core.topology import mesh_from_group
from tests.fsdp.comparison import full
from tests.fsdp.models import loss_of, make_model, micro_batch
from tests.support import init_gloo

FAILING_RANK = 1


def _sharded(
    replicate: int, shard: int, *, reshard: bool = True, timeout_s: float = 60.0, residence: Any = "private"
) -> nn.Module:
    mesh = mesh_from_group(
        dist.group.WORLD,
        Topology.from_supernode_size(replicate * shard, shard),
        shard_size="supernode",
        device_type="cpu",
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    model: Any = make_model("transformer")
    for block in model.units():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, residence=residence)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, residence=residence)
    return model


def _loss(model: nn.Module, step: int) -> Tensor:
    shares = dist.get_world_size()
    inputs, targets = micro_batch("transformer", step=step, index=0, count=1, share=dist.get_rank(), shares=shares)
    return loss_of("transformer", model(inputs), targets)


# ---- memory -------------------------------------------------------------------------------------------------------


class LiveStorages(TorchDispatchMode):
    """Remembers, without keeping it alive, the storage of every tensor that an operator returns, also to autograd."""

    def __init__(self, *, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                storage = tensor.untyped_storage()
                if storage._cdata not in self._ignored:
                    self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def live_bytes(self) -> int:
        """Bytes in storages that are still referenced from Python or C++."""
        gc.collect()
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._storages.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def memory_after_backward(*, replicate: int, shard: int, reshard: bool, reshard_after_backward: bool) -> dict[str, int]:
    """Bytes that one forward and backward leave behind, beside what they should and what the full model takes."""
    init_gloo()
    model: Any = _sharded(replicate, shard, reshard=reshard)
    model.set_reshard_after_backward(reshard_after_backward)
    parameters = list(model.parameters())
    with LiveStorages(ignored=[p._local_tensor for p in parameters]) as storages:
        _loss(model, 0).backward()
        gc.collect()
        time.sleep(0.2)  # gloo's own threads let go of a finished collective a moment after whoever waited for it
    # Uneven gradients are padded to the largest shard inside the unit's buffer.
    rows = [-(-p.shape[0] // shard) for p in parameters]
    return {
        "live": storages.live_bytes(),
        "gradients": sum(4 * r * p.numel() // p.shape[0] for r, p in zip(rows, parameters, strict=True)),
        "full": sum(4 * p.numel() for p in parameters),
    }


# ---- ranks that fail ----------------------------------------------------------------------------------------------


def train_with_failure(*, how: str, timeout_s: float) -> None:
    """Train on 2 x 2 ranks; one of them fails in the backward of the second step."""
    init_gloo(timeout_s=timeout_s)
    model: Any = _sharded(2, 2, timeout_s=timeout_s)
    optimizer = HyperAdamW(model.parameters())
    for step in range(3):
        if step == 1 and dist.get_rank() == FAILING_RANK:
            # Inside backward: the reductions of later blocks are in flight, those of earlier ones not yet issued.
            model.blocks[1].register_full_backward_pre_hook(lambda module, gradient: _fail(how))
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fail(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("injected into backward")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)  # "stall"


# ---- checkpoints that cannot be written ---------------------------------------------------------------------------


@contextlib.contextmanager
def _full_disk(enabled: bool) -> Iterator[None]:
    """No file may grow beyond 512 bytes, which is what a full disk looks like to `write`."""
    if not enabled:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_on_full_disk(*, directory: str, failing_rank: int, first: bool) -> dict[str, Any]:
    """Save while one rank cannot write; `first`: with no earlier checkpoint in place.

    Returns:
        The error's text, the names left beside the checkpoint, and whether the earlier checkpoint is unharmed.
    """
    init_gloo()
    model = _sharded(1, 2)
    optimizer = HyperAdamW(model.parameters())
    _step(model, optimizer, 0)
    saved = [full(p) for p in model.parameters()]
    path = Path(directory, "checkpoint")
    if not first:
        save_checkpoint(path, model, optimizers=optimizer, extra={"step": 1})
    _step(model, optimizer, 1)
    error = ""
    with _full_disk(dist.get_rank() == failing_rank):
        try:
            save_checkpoint(path, model, optimizers=optimizer, extra={"step": 2})
        except HyperParallelError as caught:
            error = str(caught)
    dist.barrier()
    names = sorted(os.listdir(directory))
    unharmed = None
    if not first:
        extra = load_checkpoint(path, model, optimizers=optimizer)
        same = all(torch.equal(full(p), old) for p, old in zip(model.parameters(), saved, strict=True))
        unharmed = extra == {"step": 1} and same
    return {"error": error, "names": names, "unharmed": unharmed}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    _loss(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
