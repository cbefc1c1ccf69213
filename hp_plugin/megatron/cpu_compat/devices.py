"""``torch.cuda`` as seen by Megatron: one device per local rank, streams that are already done."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from hp_plugin.megatron.cpu_compat.patches import Ledger

AREA = "devices"

_CAPABILITY = (8, 0)
# Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1 below compute capability 10 when tensor parallel, and takes
# kernels that need TransformerEngine from 9 on. 8.0 is the oldest that it treats as current.

_MEMORY_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "device_memory_used",
)
_NOTHING_TO_DO = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_stream", "ipc_collect")
_TENSOR_TYPES = (
    "FloatTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "DoubleTensor",
    "IntTensor",
    "LongTensor",
    "ByteTensor",
    "BoolTensor",
    "ShortTensor",
    "CharTensor",
)


class CpuStream:
    """A stream on which all work is done by the time that it is enqueued, as on CPU."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts what ``torch.cuda.Stream`` accepts."""

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one, at this moment."""
        event = event if event is not None else CpuEvent()
        event.record()
        return event


class CpuEvent:
    """An event that has happened when it is recorded. ``elapsed_time`` is in milliseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._seconds - self._seconds) * 1e3


def apply(ledger: Ledger) -> None:
    """Replace the device, stream and event names of ``torch.cuda``."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        name="cpu", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=_physical_memory(), multi_processor_count=1
    )
    answers: dict[str, Callable[..., Any]] = {
        # An int, because Megatron formats it into f"cuda:{current_device()}" and passes it as a device.
        "current_device": _always(0),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_name": _always("cpu"),
        "get_device_capability": _always(_CAPABILITY),
        "get_device_properties": _always(properties),
        "memory_stats": lambda *args, **kwargs: {},
        "current_stream": lambda *args, **kwargs: CpuStream(),
        "default_stream": lambda *args, **kwargs: CpuStream(),
        "stream": lambda stream=None: contextlib.nullcontext(),
        **{name: _always(0) for name in _MEMORY_COUNTERS},
        **{name: _always(None) for name in _NOTHING_TO_DO},
    }
    for name, answer in answers.items():
        ledger.replace(cuda, name, answer, area=AREA)
    ledger.replace(cuda, "Stream", CpuStream, area=AREA)
    ledger.replace(cuda, "Event", CpuEvent, area=AREA)
    for name in ("range_push", "range_pop"):
        ledger.replace(cuda.nvtx, name, _always(None), area=AREA)
    # Megatron's optimizers sort parameters by type names such as "torch.cuda.FloatTensor".
    for name in _TENSOR_TYPES:
        ledger.replace(cuda, name, getattr(torch, name), area=AREA)
    ledger.replace(torch.Tensor, "type", _cuda_type(torch.Tensor.type), area=AREA)


def _cuda_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A001
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
