"""One interface over the CPU and accelerators: streams, events, synchronisation and memory statistics.

Code outside this package asks a `Device` and never `torch.cuda` or `torch.npu`. On the CPU everything runs in program
order on the calling thread, so streams and events are objects without effect; code written for streams is correct there
as it stands. Importing this module, and `get_device` itself, initialise nothing and import no vendor package.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Protocol, cast

import torch

from hp_plugin.core.devices.report import transfers_to_npu
from hp_plugin.errors import UnsupportedError


class Event(Protocol):
    """A point in a stream's work. The native event classes of torch satisfy this."""

    def record(self, stream: Any = None) -> None:
        """Marks the end of what is queued on `stream` (the current one if None)."""

    def wait(self, stream: Any = None) -> None:
        """Makes work queued later on `stream` (the current one if None) wait for the mark."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the mark is reached."""

    def query(self) -> bool:
        """True once the mark is reached."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to `end`. Both were made to be timed, and have been reached."""


class Stream(Protocol):
    """A queue of device work. The native stream classes of torch satisfy this."""

    def wait_event(self, event: Any) -> None:
        """Makes work queued later wait for `event`."""

    def wait_stream(self, stream: Any) -> None:
        """Makes work queued later wait for all that is queued on `stream` now."""

    def record_event(self, event: Any = None) -> Any:
        """Records `event`, or a new one, here and returns it."""

    def synchronize(self) -> None:
        """Blocks the calling thread until all queued work is done."""


class NullEvent:
    """An event of a device whose work is already done when a call returns."""

    def record(self, stream: Any = None) -> None:
        """Does nothing: all earlier work is done."""

    def wait(self, stream: Any = None) -> None:
        """Does nothing: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def query(self) -> bool:
        """True: all earlier work is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Zero: nothing is queued, so nothing waits in a queue."""
        return 0.0


class NullStream:
    """The stream of a device that works in program order."""

    def wait_event(self, event: Any) -> None:
        """Does nothing: work is done in program order."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: work is done in program order."""

    def record_event(self, event: Any = None) -> Any:
        """Returns `event`, or a new `NullEvent`."""
        return NullEvent() if event is None else event

    def synchronize(self) -> None:
        """Does nothing: work is done in program order."""


class Device(ABC):
    """A kind of device, as seen by one process.

    Attributes:
        type: the torch device type, `"cpu"`, `"cuda"` or `"npu"`.
        has_streams: whether work is queued and runs beside the calling thread.
    """

    type: str
    has_streams: bool

    @abstractmethod
    def is_available(self) -> bool:
        """True if this process can use such a device."""

    @abstractmethod
    def current_device(self) -> torch.device:
        """The device, with its index, that this process works on now."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which operations are queued now."""

    @abstractmethod
    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream on the current device."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Context manager: operations inside are queued on `stream`."""

    @abstractmethod
    def new_event(self, *, timed: bool = False) -> Event:
        """A new event, not recorded yet; only one that is made to be timed has an `elapsed_time`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the calling thread until all work queued on the current device is done."""

    @abstractmethod
    def memory_allocated(self) -> int | None:
        """Bytes of tensors alive on the current device, or None where torch does not count them."""

    @abstractmethod
    def max_memory_allocated(self) -> int | None:
        """Most bytes of tensors ever alive since the last reset, or None where torch does not count them."""

    @abstractmethod
    def reset_peak_memory_stats(self) -> None:
        """Starts a new measurement of `max_memory_allocated`."""


class CpuDevice(Device):
    """The host. Program order; torch keeps no count of its memory."""

    type = "cpu"
    has_streams = False

    def is_available(self) -> bool:
        """Always."""
        return True

    def current_device(self) -> torch.device:
        """The host, which has no index."""
        return torch.device("cpu")

    def current_stream(self) -> Stream:
        """The stream without effect."""
        return NullStream()

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A stream without effect."""
        return NullStream()

    def use_stream(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """A context without effect."""
        return contextlib.nullcontext(stream)

    def new_event(self, *, timed: bool = False) -> Event:
        """An event without effect."""
        return NullEvent()

    def synchronize(self) -> None:
        """Does nothing: all work is done when a call returns."""

    def memory_allocated(self) -> int | None:
        """None: torch does not count host memory."""
        return None

    def max_memory_allocated(self) -> int | None:
        """None: torch does not count host memory."""
        return None

    def reset_peak_memory_stats(self) -> None:
        """Does nothing: there are no such statistics."""


class AcceleratorDevice(Device):
    """A device behind `torch.cuda` or a module of the same shape (`torch.npu`, once torch_npu is imported).

    Not run on such hardware yet. The calls are those that both modules document under the same names.
    """

    has_streams = True

    def __init__(self, device_type: str) -> None:
        self.type = device_type

    @property
    def _module(self) -> Any:
        module = getattr(torch, self.type, None)  # looked up late: torch.npu appears when torch_npu is imported
        if module is None:
            raise UnsupportedError(
                f"torch has no module torch.{self.type}, so device type {self.type!r} cannot be used here; import the "
                f"package that provides it first (torch_{self.type}), or choose device type 'cpu'."
            )
        return module

    def is_available(self) -> bool:
        """True if the module exists and reports a device."""
        return hasattr(torch, self.type) and bool(self._module.is_available())

    def current_device(self) -> torch.device:
        """The module's current device."""
        return torch.device(self.type, self._module.current_device())

    def current_stream(self) -> Stream:
        """The module's current stream."""
        return cast(Stream, self._module.current_stream())

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A native stream; priority -1 is above the default 0."""
        return cast(Stream, self._module.Stream(priority=-1 if high_priority else 0))

    def use_stream(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """The module's own context manager."""
        return cast(contextlib.AbstractContextManager[Any], self._module.stream(stream))

    def new_event(self, *, timed: bool = False) -> Event:
        """A native event."""
        return cast(Event, self._module.Event(enable_timing=timed))

    def synchronize(self) -> None:
        """Waits for the module's current device."""
        self._module.synchronize()

    def memory_allocated(self) -> int | None:
        """Bytes that the module's allocator has handed out."""
        return int(self._module.memory_allocated())

    def max_memory_allocated(self) -> int | None:
        """The most bytes that the module's allocator had handed out."""
        return int(self._module.max_memory_allocated())

    def reset_peak_memory_stats(self) -> None:
        """Resets the module's peak counters."""
        self._module.reset_peak_memory_stats()


def get_device(device_type: str) -> Device:
    """The interface to devices of `device_type` (`"cpu"`, `"cuda"` or `"npu"`). Initialises nothing.

    Where torch_npu stands in for `torch.cuda` (`torch_npu.contrib.transfer_to_npu`), "cuda" means the NPU.

    Raises:
        UnsupportedError: any other type.
    """
    if device_type == "cpu":
        return CpuDevice()
    if device_type == "cuda" and transfers_to_npu():
        return AcceleratorDevice("npu")
    if device_type in ("cuda", "npu"):
        return AcceleratorDevice(device_type)
    raise UnsupportedError(f"device type {device_type!r} is not supported; use 'cpu', 'cuda' or 'npu'.")


def default_device_type() -> str:
    """The type of accelerator that this process can use, else `"cpu"`.

    NPU is asked first: where torch_npu is told to stand in for CUDA, `torch.cuda` answers for it too.
    """
    for device_type in ("npu", "cuda"):
        if get_device(device_type).is_available():
            return device_type
    return "cpu"
