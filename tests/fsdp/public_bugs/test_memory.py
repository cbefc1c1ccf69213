"""Memory of the reduction: buffers that wait for the slow link. `test_kept` has that of reshard_after_forward=N."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_plugin import MixedPrecisionPolicy
from tests.fsdp.public_bugs.slow_link import SlowLink
from tests.fsdp.public_bugs.towers import Tower, shard
from tests.fsdp.twins import make_mesh
from tests.support import run_ranks

pytestmark = pytest.mark.usefixtures("transport")

WIDTH = 24


class Buffers:
    """Storages that were given to the slow link, are not the storage of a `.grad`, and are still alive."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._alive: dict[int, int] = {}
        self.most = 0
        self.most_bytes = 0

    def note(self, operand: Tensor) -> None:
        storage = operand.untyped_storage()
        gradients = [p.grad._local_tensor for p in self._model.parameters() if isinstance(p.grad, DTensor)]
        if storage._cdata in {gradient.untyped_storage()._cdata for gradient in gradients}:
            return
        if id(storage) not in self._alive:
            self._alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, id(storage), None)
        self.most = max(self.most, len(self._alive))
        self.most_bytes = max(self.most_bytes, sum(self._alive.values()))


def most_buffers(*, replicate: int, shard_size: int, depths: list[int]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """By (depth, window): the most buffers and bytes alive, and the waits for the window."""
    mesh = make_mesh(replicate, shard_size)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    found = {}
    for depth in depths:
        for window in (1, 2, 64):
            model = shard(Tower(depth, WIDTH).bfloat16(), mesh, mp_policy=policy, bucket_bytes=1, window=window)
            inputs = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            model(inputs).backward()
            model.fsdp_counters().reset()
            buffers = Buffers(model)
            link = mesh.get_group("dp_replicate")
            with SlowLink(link, seed=dist.get_rank(), delay_s=0.02, reorder=False, on_submit=buffers.note) as slow:
                model(inputs).backward()
            assert slow.submitted == depth + 1
            found[depth, window] = (buffers.most, buffers.most_bytes, model.fsdp_counters().waits["window"].count)
    return found


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_ar_window_bounded(mesh: tuple[int, int]) -> None:
    """PyTorch #179128 (PRs #179443, #183617): HSDP kept one all-reduce buffer in the reduce dtype per layer until the
    end of backward, which raised the peak 2.3 times. Here a bf16 model whose gradients are reduced in fp32 holds as
    many of these buffers as the window allows, however deep it is.
    """
    numel = WIDTH * WIDTH + 3 * WIDTH  # of a layer
    buffer_bytes = 4 * (numel // mesh[1] + 32 * 4)  # up to 31 elements between slots
    shallow, deep = 4, 16
    for found in run_ranks(
        mesh[0] * mesh[1], most_buffers, replicate=mesh[0], shard_size=mesh[1], depths=[shallow, deep]
    ):
        for depth in (shallow, deep):
            for window in (1, 2):
                most, most_bytes, waits = found[depth, window]
                assert 1 <= most <= window
                assert most_bytes <= window * buffer_bytes
                assert waits > 0, "bounded, and counted where it costs time"
        assert found[deep, 64][0] > 4, "the link was not slow enough to see what is bounded"
        assert found[deep, 64][2] == 0
