"""Process groups on gloo under the names of nccl, and the few calls that gloo does not take."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.megatron.cpu_compat.patches import Ledger

AREA = "process groups"


def apply(ledger: Ledger) -> None:
    """Replace the names of ``torch.distributed`` by which Megatron asks for nccl."""
    replacements = {
        "init_process_group": _init_on_gloo(dist.init_process_group),
        "new_group": _group_on_gloo(dist.new_group),
        "all_to_all_single": _host_sizes(dist.all_to_all_single),
        "all_gather": _uneven(dist.all_gather),
    }
    for name, replacement in replacements.items():
        ledger.replace(dist, name, replacement, area=AREA)
    sent = _kept_until_sent(dist.isend)
    for owner in (dist, distributed_c10d):  # `P2POp` compares with the latter
        ledger.replace(owner, "isend", sent, area=AREA)
    if torch.__version__ < "2.8":  # up to 2.7 gloo has no reduce-scatter
        ledger.replace(dist, "reduce_scatter", _summed_and_cut(dist.reduce_scatter), area=AREA)
    if not hasattr(dist, "ProcessGroupNCCL"):  # a CPU build of torch
        options = type("Options", (), {"__init__": _nccl_options})
        ledger.replace(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=options), area=AREA)
    ledger.replace(DeviceMesh, "__init__", _mesh_on_cpu(DeviceMesh.__init__), area=AREA)
    ledger.replace(DeviceMesh, "from_group", staticmethod(_from_group_on_cpu(DeviceMesh.from_group)), area=AREA)


def _nccl_options(self: Any, *args: Any, **kwargs: Any) -> None:
    self.config = types.SimpleNamespace()


def _init_on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        keep = backend if backend in ("gloo", "fake") else "gloo"
        return original(keep, *args, **kwargs)

    return init_process_group


def _group_on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return original(*args, **kwargs)

    return new_group


def _kept_until_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    """`isend` that keeps the memory it reads.

    Megatron takes the memory of an output away (`deallocate_output_tensor`) as soon as its transfer has been issued.
    The stream orders that on a device. Gloo sends later, and would send what has been written there since.
    """

    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)  # another tensor over the same memory, which the work holds

    return isend


def _host_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def plain(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        # Megatron moves split sizes to the host only where they are CUDA tensors; here they are tensors already there.
        return original(output, input.contiguous(), plain(output_split_sizes), plain(input_split_sizes), **kwargs)

    return all_to_all_single


def _uneven(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if all(output.shape == tensor.shape for output in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        # nccl takes outputs of different sizes, gloo does not: gather padded copies. Always synchronous.
        padded = torch.zeros(max(output.numel() for output in tensor_list), dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        received = [torch.empty_like(padded) for _ in tensor_list]
        original(received, padded, group=group)
        with torch.no_grad():
            for output, buffer in zip(tensor_list, received, strict=True):
                output.copy_(buffer[: output.numel()].view_as(output))
        return None

    return all_gather


def _summed_and_cut(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # Always synchronous.
        whole = torch.cat([part.detach().reshape(-1) for part in input_list])
        dist.all_reduce(whole, op=op, group=group)
        mine = whole.split([part.numel() for part in input_list])[dist.get_rank(group)]
        with torch.no_grad():
            output.copy_(mine.view_as(output))
        return None

    return reduce_scatter


def _cpu(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


def _mesh_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, _cpu(device_type), *args, **kwargs)

    return __init__


def _from_group_on_cpu(original: Callable[..., DeviceMesh]) -> Callable[..., DeviceMesh]:
    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return original(group, _cpu(device_type), *args, **kwargs)

    return from_group
