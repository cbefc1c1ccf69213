"""Rank functions: what is alive between steps, and gradients that someone keeps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hp_plugin import HyperAdamW
from hp_plugin.core.fsdp.root import unit_of
from tests.fsdp.twins import batch, make_mesh, pair


def gradients_kept_past_the_step(replicate: int, shard: int) -> dict[str, bool]:
    """Trains three steps, keeping gradients of the first in three ways."""
    _, sharded = pair(make_mesh(replicate, shard))
    optimizer = HyperAdamW(sharded.parameters(), lr=1e-2)
    unit = unit_of(sharded)
    assert unit is not None

    def backward(index: int) -> None:
        optimizer.zero_grad()
        sharded(batch(index)[dist.get_rank()]).square().mean().backward()

    def flat_bytes() -> int:
        buckets = unit.root.pipeline.buckets
        return sum(0 if b._flat is None else b._flat.untyped_storage().nbytes() for b in buckets)

    found: dict[str, Any] = {}
    backward(0)
    optimizer.step()
    optimizer.zero_grad()
    sharded(batch(1)[dist.get_rank()])
    found["memory is given back in forward"] = flat_bytes() == 0
    for way in ("gradient", "local", "view"):
        backward(2)
        parameters = [p for p in sharded.parameters() if p.grad._local_tensor.numel()]
        kept: Any = {
            "gradient": lambda p: p.grad,
            "local": lambda p: p.grad._local_tensor,
            "view": lambda p: p.grad._local_tensor[:1],
        }[way](parameters[0])
        value = (kept._local_tensor if way == "gradient" else kept).clone()
        optimizer.step()
        backward(3)
        found[f"{way} kept"] = torch.equal(kept._local_tensor if way == "gradient" else kept, value)
        found[f"{way} is not the new gradient"] = not torch.equal(
            parameters[0].grad._local_tensor[:1].flatten()[:1], value.flatten()[:1]
        )
        del kept
    return found


def gradients_dropped_between_micro_batches(replicate: int, shard: int) -> bool:
    """A sum that began beside a gradient is delivered after that gradient has been dropped, two forwards later."""
    _, sharded = pair(make_mesh(replicate, shard))

    def backward(index: int, *, all_reduce: bool) -> None:
        sharded.set_requires_all_reduce(all_reduce)
        sharded(batch(index)[dist.get_rank()]).square().mean().backward()

    def gradients() -> list[torch.Tensor]:
        return [p.grad._local_tensor.clone() for p in sharded.parameters()]

    backward(1, all_reduce=False)
    backward(2, all_reduce=True)
    expected = gradients()
    sharded.zero_grad()
    backward(0, all_reduce=True)
    backward(1, all_reduce=False)  # beside the gradient
    sharded.zero_grad()
    backward(2, all_reduce=True)
    return all(torch.equal(a, b) for a, b in zip(expected, gradients(), strict=True))


def messages_that_the_back_end_still_holds(replicate: int, shard: int) -> dict[str, bool]:
    """A thread of gloo drops a message a moment after `wait` returned; here it never does."""
    _, sharded = pair(make_mesh(replicate, shard))
    unit = unit_of(sharded)
    assert unit is not None
    held: list[torch.Tensor] = []
    all_reduce = dist.all_reduce

    def holding(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(tensor)
        return all_reduce(tensor, *args, **kwargs)

    built, given_back, addresses = [], [], []
    with mock.patch.object(dist, "all_reduce", holding):
        for index in range(3):
            output = sharded(batch(index)[dist.get_rank()])
            flats = [bucket._flat for bucket in unit.root.pipeline.buckets]
            given_back.append(all(flat is None or flat.untyped_storage().nbytes() == 0 for flat in flats))
            output.square().mean().backward()
            built.append(sharded.fsdp_counters().gradient_dtensors_built)
            addresses.append([id(parameter.grad) for parameter in sharded.parameters()])
            sharded.zero_grad()
    return {
        "it holds some": bool(held),
        "memory is given back": all(given_back),
        "gradients are the same objects": addresses[0] == addresses[1] == addresses[2],
        "none is built again": len(set(built)) == 1,
    }
