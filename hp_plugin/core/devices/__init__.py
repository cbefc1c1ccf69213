"""The only place that knows one kind of device from another: streams, events, memory, backend capabilities."""

from __future__ import annotations

from hp_plugin.core.devices.capabilities import Capabilities, backend_capabilities
from hp_plugin.core.devices.clock import StreamClock
from hp_plugin.core.devices.device import (
    AcceleratorDevice,
    CpuDevice,
    Device,
    Event,
    NullEvent,
    NullStream,
    Stream,
    default_device_type,
    get_device,
)

__all__ = [
    "AcceleratorDevice",
    "Capabilities",
    "CpuDevice",
    "Device",
    "Event",
    "NullEvent",
    "NullStream",
    "Stream",
    "StreamClock",
    "backend_capabilities",
    "default_device_type",
    "get_device",
]
