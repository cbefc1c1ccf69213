"""The CPU device runs code written for streams; the accelerator class forwards to the vendor module, looked up late."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from hp_plugin.core.devices import AcceleratorDevice, CpuDevice, NullEvent, get_device
from hp_plugin.errors import UnsupportedError


def test_cpu_runs_stream_code_in_program_order() -> None:
    device = get_device("cpu")
    assert isinstance(device, CpuDevice)
    assert device.is_available()
    assert not device.has_streams
    assert device.current_device() == torch.device("cpu")
    stream, event = device.new_stream(high_priority=True), device.new_event()
    with device.use_stream(stream):
        value = torch.ones(3) * 2
        event.record(stream)
    stream.wait_stream(device.current_stream())
    stream.wait_event(event)
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), NullEvent)
    event.wait()
    event.synchronize()
    stream.synchronize()
    device.synchronize()
    assert event.query()
    assert value.sum() == 6


def test_cpu_says_that_memory_is_not_counted() -> None:
    device = get_device("cpu")
    device.reset_peak_memory_stats()
    assert device.memory_allocated() is None
    assert device.max_memory_allocated() is None


def test_accelerator_forwards_to_the_module_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MagicMock()
    module.current_device.return_value = 3
    module.memory_allocated.return_value = 7
    module.max_memory_allocated.return_value = 9
    monkeypatch.setattr(torch, "npu", module, raising=False)
    device = get_device("npu")
    assert device.type == "npu"
    assert device.has_streams
    assert device.is_available()
    assert device.new_stream(high_priority=True) is module.Stream.return_value
    module.Stream.assert_called_once_with(priority=-1)
    assert device.current_stream() is module.current_stream.return_value
    assert device.new_event() is module.Event.return_value
    module.Event.assert_called_once_with(enable_timing=False)
    device.new_event(timed=True)
    module.Event.assert_called_with(enable_timing=True)
    stream = SimpleNamespace()
    assert device.use_stream(stream) is module.stream.return_value  # type: ignore[arg-type]
    module.stream.assert_called_once_with(stream)
    device.synchronize()
    module.synchronize.assert_called_once_with()
    assert (device.memory_allocated(), device.max_memory_allocated()) == (7, 9)
    device.reset_peak_memory_stats()
    module.reset_peak_memory_stats.assert_called_once_with()


def test_a_missing_vendor_module_is_named() -> None:
    if hasattr(torch, "npu"):
        pytest.skip("torch_npu is imported in this process")
    device = AcceleratorDevice("npu")
    assert not device.is_available()
    with pytest.raises(UnsupportedError, match=r"no module torch\.npu"):
        device.current_stream()


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'tpu' is not supported; use 'cpu', 'cuda' or 'npu'"):
        get_device("tpu")


def test_importing_and_asking_initialise_no_device() -> None:
    code = (
        "import sys, torch\n"
        "import hp_plugin.core.devices as devices\n"
        "for kind in ('cpu', 'cuda', 'npu'): devices.get_device(kind)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch_npu' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
