"""A device type that is neither cuda nor cpu trains as the CPU does: nothing in the core names a device by accident.

The device is the host in disguise (`tests/fake_npu/`), with the backend `hccl` behind `cpu:gloo,npu:hccl` as with
torch_npu: streams, events, lanes, collectives in one launch, no shared memory, no averages. Kernels of it refuse host
memory, as those of a real device do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hp_plugin.core.devices.capabilities import HCCL_COALESCED_VARIABLE
from tests.fake_npu import build, device
from tests.fake_npu.training import Result, train
from tests.support import run_ranks

needs_device = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def run_both(tmp_path: Path, *, coalesces: bool = False, **kwargs: object) -> list[tuple[Result, Result]]:
    found, env = [], {HCCL_COALESCED_VARIABLE: str(int(coalesces))}
    for device_type in ("cpu", "npu"):
        folder = tmp_path / device_type
        folder.mkdir()
        found.append(
            run_ranks(4, train, device_type=device_type, directory=str(folder), timeout=240, env=env, **kwargs)
        )
    return list(zip(*found))


def check(pairs: list[tuple[Result, Result]], *, relative: float, weights: float) -> None:
    for cpu, npu in pairs:
        assert cpu.devices == ["cpu"] * 3
        assert npu.devices == ["npu"] * 3
        assert npu.backend == "cpu:gloo,npu:hccl"
        assert npu.losses == pytest.approx(cpu.losses, rel=relative)
        assert npu.norms == pytest.approx(cpu.norms, rel=relative)
        assert npu.losses[0] != npu.losses[-1]
        for name, weight in cpu.weights.items():
            torch.testing.assert_close(npu.weights[name], weight, rtol=0, atol=weights, msg=name)


@needs_device
def test_fsdp_muon_clipping_and_a_checkpoint_give_the_results_of_the_cpu(tmp_path: Path) -> None:
    check(run_both(tmp_path, micro_batches=2), relative=2e-6, weights=5e-6)


@needs_device
@pytest.mark.full
def test_one_launch_for_all_operands_of_a_unit_gives_the_same(tmp_path: Path) -> None:
    check(run_both(tmp_path, micro_batches=2, coalesces=True), relative=2e-6, weights=5e-6)


@needs_device
@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bf16_stays_beside_the_cpu(tmp_path: Path, micro_batches: int) -> None:
    check(run_both(tmp_path, precision="bf16", micro_batches=micro_batches), relative=5e-3, weights=2e-2)


def mix_memories() -> str:
    device.install()
    try:
        torch.ones(2, device="npu").scatter_(0, torch.tensor([0]), 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


@needs_device
def test_the_device_refuses_host_memory() -> None:
    assert "cpu" in run_ranks(1, mix_memories)[0]
