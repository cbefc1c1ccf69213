"""`install()`: from then on this process has a device type `npu` and a backend `hccl`, without torch_npu."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.fake_npu import build

_extension: ModuleType | None = None
BACKENDS: dict[str, Any] = {}
"""By the name of the group: the backend of its tensors on the device, whose `stream` is that of its collectives."""
_moves = True


def extension() -> ModuleType:
    """The C++ side of the device that `install` made."""
    assert _extension is not None, "call install() first"
    return _extension


def install() -> ModuleType:
    """Makes the device and the backend, once in a process, and returns the module that is `torch.npu` then."""
    global _extension
    if _extension is None:
        _extension = build.load()
        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", _module(_extension))
        torch.utils.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend("hccl", _new_backend, extended_api=True, devices=["npu"])
    module: ModuleType = torch.npu  # type: ignore[attr-defined]
    return module


def init_alone(world_size: int) -> None:
    """A default group in which this process plays rank 0 and no bytes move: their values are of no interest."""
    global _moves
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _moves = False
    dist.init_process_group("npu:hccl", rank=0, world_size=world_size, store=FakeStore())


def init_ranks(*, timeout_s: float = 60.0) -> None:
    """The default group of a rank of `run_ranks`; collectives of the device go through gloo."""
    global _moves
    _moves = True
    dist.init_process_group("cpu:gloo,npu:hccl", init_method="env://", timeout=timedelta(seconds=timeout_s))


def _new_backend(options: Any, _: Any) -> Any:
    carrier = None
    if _moves:
        store = dist.PrefixStore("carrier", options.store)
        carrier = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    backend = extension().FakeHccl(options.group_rank, options.group_size, carrier)
    BACKENDS[options.group_id] = backend
    return backend


def _module(extension: ModuleType) -> ModuleType:
    """What torch, DTensor, DCP and we ask of a device's module: the names of torch_npu, with this device behind."""
    module: Any = ModuleType("torch.npu")

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    @contextlib.contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        before = extension.current_stream()
        extension.set_current_stream(chosen.stream_id)
        try:
            yield
        finally:
            extension.set_current_stream(before)

    def event(enable_timing: bool = False, **_: Any) -> torch.Event:
        return torch.Event("npu", enable_timing=enable_timing)

    def new_stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
        return torch.Stream("npu", priority=priority)

    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.bfloat16],
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(module, name, functools.partial(_answer, answer))
    for name in ("init", "_lazy_init", "set_device", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(module, name, functools.partial(_answer, None))
    module.current_stream = current_stream
    module.default_stream = current_stream
    module.stream = stream
    module.Stream = new_stream
    module.Event = event
    module.synchronize = lambda device=None: extension.synchronize()
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: extension.memory_allocated()
    module.max_memory_allocated = lambda device=None: extension.max_memory_allocated()
    module.reset_peak_memory_stats = lambda device=None: extension.reset_peak()
    return module


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value
