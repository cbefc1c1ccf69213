"""Parameters with gradients on a (dp_replicate, dp_shard) mesh, and the same on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_plugin.core.layout import local_tensor

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)]
SHAPES = [(8, 3), (5, 2), (1,), (3, 4), (7,)]  # even, uneven, emptier than the shard axis
DIMS = [0, 0, 0, 1, 0]


def make_mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def full_values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def plain_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in full_values(0)]


def sharded(value: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    return distribute_tensor(value, mesh, [Replicate(), Shard(dim)], src_data_rank=None)


def sharded_parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    return [nn.Parameter(sharded(value, mesh, dim)) for value, dim in zip(full_values(0), DIMS, strict=True)]


def set_gradients(params: list[nn.Parameter], seed: int, *, scale: float = 1.0) -> None:
    """Gives every parameter the gradient of this seed, laid out like the parameter."""
    for param, value in zip(params, full_values(seed), strict=True):
        value = value * scale
        if isinstance(param, DTensor):
            [dim] = [p.dim for p in param.placements if isinstance(p, Shard)]
            param.grad = sharded(value, param.device_mesh, dim)
        else:
            param.grad = value


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Plain parameters with the values of the local shards, in memory of their own."""
    return [nn.Parameter(local_tensor(param).detach().clone()) for param in params]


@contextlib.contextmanager
def no_dtensor_work() -> Iterator[None]:
    """Fails if a DTensor is constructed or an operation on one is dispatched inside."""
    original_new, original_dispatch = DTensor.__new__, DTensor.__torch_dispatch__

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a DTensor was constructed or dispatched")

    DTensor.__new__ = refuse  # type: ignore[method-assign, assignment]
    DTensor.__torch_dispatch__ = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DTensor.__new__ = original_new  # type: ignore[method-assign]
        DTensor.__torch_dispatch__ = original_dispatch  # type: ignore[method-assign]
