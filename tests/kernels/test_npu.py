"""The adapter to torch_npu: references here, and its calls on the real package if HP_TEST_TORCH_NPU names a Python.

The real package needs Ascend's driver libraries, for which stand-ins are made that answer every call with an error. So
names, arguments and shapes can be tested, by calling operators on meta tensors; values never.

    HP_TEST_TORCH_NPU=/path/to/python pytest tests/kernels/test_npu.py

That Python has torch_npu and a torch without CUDA, whose allocator settings torch_npu's collide with.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from hp_plugin.core.kernels import grouped_matmul, layers, npu, rms_norm, swiglu, table
from hp_plugin.core.kernels.adam import AdamOptions, AdamShard, adamw_reference, fused_adamw
from hp_plugin.errors import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("HP_TEST_TORCH_NPU", "")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layers_without_a_vendor() -> None:
    x, weight = drawn(3, 8), drawn(8, seed=1)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), exact)
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(swiglu(x), gate * torch.sigmoid(gate) * up)
    rows, weights = drawn(6, 4), drawn(3, 4, 5, seed=2)
    counts = torch.tensor([2, 0, 4])
    found = grouped_matmul(rows, weights, counts)
    torch.testing.assert_close(found, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]]))
    with pytest.raises(ConfigurationError, match="must be even"):
        swiglu(x[:, :3])


def test_an_operator_that_the_package_lacks_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = table.Kernels(frozenset({"npu"}), {}, {"cpu": "npu"})
    monkeypatch.setattr(table, "kernels", lambda: chosen)
    monkeypatch.setattr(npu, "operators", lambda: frozenset({"npu_rms_norm"}))
    x = torch.ones(2, 4)
    assert layers._npu_has("rms_norm", "npu_rms_norm", x)
    assert not layers._npu_has("swiglu", "npu_swiglu", x)
    torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(torch.ones(2, 2)))
    shard = AdamShard(*(torch.ones(3) for _ in range(4)), torch.zeros(()))
    options = AdamOptions(0.1, (0.9, 0.99), 1e-8, 0.0)
    assert fused_adamw([shard], options) == [shard]
    assert npu.operators() == {"npu_rms_norm"}


def test_adamw_hands_over_the_powers_from_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the formula of torch_npu's own test of the operator."""

    class Operator:
        @staticmethod
        def out(b1_power, b2_power, lr, decay, b1, b2, eps, grad, norm, amsgrad, maximize, *, out):  # type: ignore[no-untyped-def]
            assert norm is None and amsgrad is False and maximize is False
            var, m, v = out
            m.copy_(m * b1 - (b1 - 1) * grad)
            v.copy_(v * b2 - (b2 - 1) * grad * grad)
            denominator = (v / (1 - b2_power * b2)).sqrt() + eps
            var.copy_(var * (1 - lr * decay) - lr * m / (1 - b1_power * b1) / denominator)

    class Npu:
        npu_apply_adam_w = Operator

    monkeypatch.setattr(torch.ops, "npu", Npu, raising=False)
    monkeypatch.setattr(npu, "operators", lambda: frozenset({"npu_apply_adam_w"}))
    chosen = table.Kernels(frozenset({"npu"}), {}, {"cpu": "npu"})
    monkeypatch.setattr(table, "kernels", lambda: chosen)
    options = AdamOptions(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    mine = AdamShard(*(drawn(9, seed=i).float().abs() for i in range(4)), torch.tensor(0.0))
    exact = AdamShard(*(tensor.double() for tensor in mine))
    for _ in range(3):
        assert fused_adamw([mine], options) == []
        adamw_reference(exact, options)
    for found, expected in zip(mine, exact):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


ON_THE_REAL_PACKAGE = """
import json, os, sys, types
import torch, torch_npu
torch.npu.is_available = lambda: False
# Without the package around them, whose other parts need more than this environment has.
root = os.environ["HP_REPOSITORY"]
for name in ("hp_plugin", "hp_plugin.core", "hp_plugin.core.kernels"):
    module = types.ModuleType(name)
    module.__path__ = [os.path.join(root, *name.split("."))]
    sys.modules[name] = module
from hp_plugin.core.kernels import npu
found = {"operators": sorted(npu.operators())}
meta = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")
found["rms_norm"] = list(npu.rms_norm(meta(5, 16), meta(16), 1e-5).shape)
found["swiglu"] = list(npu.swiglu(meta(5, 16)).shape)
x, weights, counts = meta(24, 16), meta(3, 16, 32), meta(3, dtype=torch.int64)
found["grouped"] = list(npu._grouped(x, weights, counts, npu._SPLIT_ROWS).shape)
found["grouped_backward_x"] = list(npu._grouped(meta(24, 32), weights.mT, counts, npu._SPLIT_ROWS).shape)
found["grouped_backward_weights"] = list(npu._grouped(x.mT, meta(24, 32), counts, npu._SPLIT_DEPTH).shape)
from hp_plugin.core.kernels.adam import AdamOptions, AdamShard
shard = AdamShard(*(meta(7, dtype=torch.float32) for _ in range(4)), torch.zeros(()))
npu.adamw_(shard, AdamOptions(1e-3, (0.9, 0.99), 1e-8, 0.1), 1)
found["adamw"] = list(shard.param.shape)
print(json.dumps(found), flush=True)
os._exit(0)  # the stand-ins cannot shut a device down
"""


@pytest.mark.skipif(not PYTHON, reason="HP_TEST_TORCH_NPU names no Python with torch_npu")
def test_our_calls_fit_the_real_package(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HP_REPOSITORY": str(REPOSITORY)}
    where = "import importlib.util as u; print(u.find_spec('torch_npu').submodule_search_locations[0])"
    folder = subprocess.run(
        [PYTHON, "-c", where], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()
    stubs = [PYTHON, str(REPOSITORY / "tools" / "torch_npu_stubs.py"), str(Path(folder).parent), str(tmp_path)]
    subprocess.run(stubs, env=environment, capture_output=True, text=True, timeout=250, check=True)
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    command = [PYTHON, "-c", ON_THE_REAL_PACKAGE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == {
        "operators": sorted(npu.OPERATORS),
        "rms_norm": [5, 16],
        "swiglu": [5, 8],
        "grouped": [24, 32],
        "grouped_backward_x": [24, 16],
        "grouped_backward_weights": [3, 16, 32],
        "adamw": [7],
    }
