"""What a communication backend can do, read from its name, its wrapper and the torch version.

Nothing is tried out on a live group: a coalesced call that a backend refuses leaves gloo unusable for the rest of the
process, and an average that torch 2.7 is asked of gloo's reduce-scatter comes back as a sum without any error.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hp_plugin.errors import ConfigurationError

_ELEMENTARY = frozenset({"sum", "product", "min", "max"})
HCCL_COALESCED_VARIABLE = "HP_HCCL_COALESCED"
"""Set to 1, all operands of a unit leave in one launch on HCCL too, which nobody has run yet."""
_DEBUG_WRAPPER = "_ProcessGroupWrapper"  # what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a backend


@dataclass(frozen=True)
class Capabilities:
    """What may be asked of a process group.

    Attributes:
        backend: backend name, e.g. `"gloo"`; names joined by `"+"` if the group has several.
        reduce_ops: names of `torch.distributed.ReduceOp` members, lower case, that reduce and reduce-scatter right.
        coalesced_all_gather: `group.allgather_into_tensor_coalesced(outputs, inputs)` exists. All tensors of one call
            must have one dtype: gloo reads mixed dtypes as the first tensor's and returns wrong values silently.
        coalesced_reduce_scatter: `group.reduce_scatter_tensor_coalesced(outputs, inputs, options)` exists.
        all_to_all: `group.alltoall_base(output, input, [], [])` exists.
        waits_on_host: `Work.wait()` blocks the calling thread (gloo) instead of ordering the current stream.
    """

    backend: str
    reduce_ops: frozenset[str] = _ELEMENTARY
    coalesced_all_gather: bool = False
    coalesced_reduce_scatter: bool = False
    all_to_all: bool = False
    waits_on_host: bool = False

    @property
    def can_average(self) -> bool:
        """True if `ReduceOp.AVG` gives the mean in all-reduce and in reduce-scatter."""
        return "avg" in self.reduce_ops

    @property
    def can_premultiply(self) -> bool:
        """True if `ReduceOp.PREMUL_SUM` (sum of scaled inputs) exists."""
        return "premul_sum" in self.reduce_ops

    def intersection(self, other: Capabilities) -> Capabilities:
        """What both can do."""
        return Capabilities(
            backend=self.backend if self.backend == other.backend else f"{self.backend}+{other.backend}",
            reduce_ops=self.reduce_ops & other.reduce_ops,
            coalesced_all_gather=self.coalesced_all_gather and other.coalesced_all_gather,
            coalesced_reduce_scatter=self.coalesced_reduce_scatter and other.coalesced_reduce_scatter,
            all_to_all=self.all_to_all and other.all_to_all,
            waits_on_host=self.waits_on_host or other.waits_on_host,
        )


def backend_capabilities(group: dist.ProcessGroup | None = None, *, device_type: str | None = None) -> Capabilities:
    """What `group` can do. Local: no communication, any rank may call it alone.

    Args:
        group: a process group; None is the default group.
        device_type: `"cpu"`, `"cuda"` or `"npu"` to ask for the backend that serves tensors there. None gives what
            holds for every device type that the group serves.

    Returns:
        The capabilities. Of a backend that is not in the table only elementary reductions are assumed.

    Raises:
        ConfigurationError: the group has no backend for `device_type`.
    """
    group = group if group is not None else dist.group.WORLD
    backends = _backends_by_device_type(group)
    if device_type is not None and device_type not in backends:
        raise ConfigurationError(
            f"the process group has backends for {sorted(backends)}, but none for {device_type!r}; create it with one, "
            f"e.g. backend='cpu:gloo,{device_type}:...'."
        )
    wanted = [device_type] if device_type is not None else sorted(backends)
    found = [_of_backend(backends[kind], wrapped=_is_wrapped(group, kind)) for kind in wanted]
    return functools.reduce(Capabilities.intersection, found)


def _backends_by_device_type(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Device type -> backend name, from a text such as `"cpu:gloo,cuda:nccl"`."""
    config = dist.get_backend_config(group)
    return {kind: backend.lower() for kind, backend in (entry.split(":") for entry in config.split(","))}


def _is_wrapped(group: dist.ProcessGroup | None, device_type: str) -> bool:
    registered = {device.type for device in group._device_types} if group is not None else set()
    if device_type not in registered:
        return False  # a backend that torch lists but never made, e.g. gloo for "cuda" in a CPU build
    return type(group._get_backend(torch.device(device_type))).__name__ == _DEBUG_WRAPPER  # type: ignore[union-attr]


def _of_backend(backend: str, *, wrapped: bool) -> Capabilities:
    coalesced = not wrapped or _torch_version() >= (2, 13)  # older debug wrappers do not forward coalesced calls
    if backend == "gloo":
        # Averages: torch 2.13 divides; 2.7 refuses them in all-reduce and returns the sum in reduce-scatter.
        average = frozenset({"avg"}) if _torch_version() >= (2, 13) else frozenset()
        return Capabilities("gloo", _ELEMENTARY | average, coalesced, coalesced, True, waits_on_host=True)
    if backend == "nccl":
        return Capabilities("nccl", _ELEMENTARY | {"avg", "premul_sum"}, coalesced, coalesced, True)
    if backend == "hccl":
        # Averages and PREMUL_SUM are not HCCL's. The coalesced calls are in torch_npu 2.13 (its ProcessGroupHCCL
        # defines them) but have not been run; earlier releases were not looked at.
        asked = os.environ.get(HCCL_COALESCED_VARIABLE) == "1" and coalesced and _torch_version() >= (2, 13)
        return Capabilities("hccl", _ELEMENTARY, asked, asked, True)
    if backend == "fake":
        return Capabilities("fake", _ELEMENTARY, coalesced, coalesced, True)
    return Capabilities(backend)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
