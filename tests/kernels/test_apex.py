"""The adapter to NVIDIA's apex, on stand-ins for its modules that take the real arguments and compute in torch."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.accumulate import scale_copy_reference
from hp_plugin.core.kernels.adam import AdamOptions, AdamShard, adamw_reference, fused_adamw
from hp_plugin.core.kernels.norm import l2_norm
from hp_plugin.core.kernels.weight_gradient import accumulate_weight_gradient_
from hp_plugin.core.optim import HyperAdamW, clip_grad_norm_
from hp_plugin.errors import ConfigurationError

CHUNK = 2048 * 32
"""What apex hands to every operation."""


class AmpC(ModuleType):
    """Stands for `amp_C`: signatures and formulas of csrc/amp_C_frontend.cpp and the kernels behind it."""

    def __init__(self) -> None:
        super().__init__("amp_C")
        self.__spec__ = ModuleSpec("amp_C", None)
        self.calls: list[str] = []

    def _called(self, name: str, chunk_size: int, flag: Tensor, lists: list[list[Tensor]], depth: int) -> None:
        self.calls.append(name)
        assert chunk_size == CHUNK
        assert flag.dtype == torch.int32 and flag.shape == (1,) and int(flag) == 0
        assert len(lists) == depth
        assert all(len(each) == len(lists[0]) > 0 for each in lists)
        assert all(tensor.is_contiguous() and tensor.numel() for each in lists for tensor in each)

    def multi_tensor_scale(self, chunk_size: int, flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
        self._called("scale", chunk_size, flag, lists, 2)
        for source, target in zip(*lists):
            target.copy_(source.float() * scale)

    def multi_tensor_axpby(
        self, chunk_size: int, flag: Tensor, lists: list[list[Tensor]], a: float, b: float, arg_to_check: int
    ) -> None:
        self._called("axpby", chunk_size, flag, lists, 3)
        assert arg_to_check in (-1, 0, 1)
        for x, y, out in zip(*lists):
            out.copy_(a * x.float() + b * y.float())

    def multi_tensor_l2norm(
        self, chunk_size: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool | None
    ) -> tuple[Tensor, Tensor]:
        self._called("l2norm", chunk_size, flag, lists, 1)
        assert len({tensor.dtype for tensor in lists[0]}) == 1
        squares = [tensor.float().square().sum() for tensor in lists[0]]
        return torch.stack(squares).sum().sqrt().reshape(1), torch.empty(0)

    def multi_tensor_adam(
        self,
        chunk_size: int,
        flag: Tensor,
        lists: list[list[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        self._called("adam", chunk_size, flag, lists, 4)
        assert mode == 1 and bias_correction == 1 and isinstance(step, int)
        assert len({tensor.dtype for each in lists for tensor in each}) == 1
        for g, p, m, v in zip(*lists):
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            denominator = (v / (1 - beta2**step)).sqrt() + epsilon
            p.sub_(lr * (m / (1 - beta1**step) / denominator + weight_decay * p))


class WeightGradients(ModuleType):
    """Stands for `fused_weight_gradient_mlp_cuda`."""

    def __init__(self) -> None:
        super().__init__("fused_weight_gradient_mlp_cuda")
        self.__spec__ = ModuleSpec("fused_weight_gradient_mlp_cuda", None)
        self.calls: list[str] = []

    def wgrad_gemm_accum_fp32(self, inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        self.calls.append("fp32")
        assert main_grad.dtype == torch.float32
        main_grad.add_(grad_output.float().T @ inputs.float())

    def wgrad_gemm_accum_fp16(self, inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        self.calls.append("fp16")
        assert main_grad.dtype == inputs.dtype != torch.float32
        main_grad.copy_(main_grad.float() + grad_output.float().T @ inputs.float())


@pytest.fixture
def amp_c(monkeypatch: pytest.MonkeyPatch) -> AmpC:
    """Modules of apex's names, and tensors of the CPU that take the rows of CUDA with apex alone switched on."""
    amp, weights = AmpC(), WeightGradients()

    class Applier:
        available = True

        def __call__(self, op: Any, flag: Tensor, lists: list[list[Tensor]], *arguments: Any) -> Any:
            return op(CHUNK, flag, lists, *arguments)

    package, applying = ModuleType("apex"), ModuleType("apex.multi_tensor_apply")
    applying.multi_tensor_applier = Applier()  # type: ignore[attr-defined]
    for name, module in (("apex", package), ("apex.multi_tensor_apply", applying), ("amp_C", amp)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", weights)
    chosen = table.Kernels(frozenset({"apex"}), {}, {"cpu": "cuda"})
    monkeypatch.setattr(table, "kernels", lambda: chosen)
    return amp


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norms_of_each_dtype(amp_c: AmpC) -> None:
    tensors = [drawn(5, 7), drawn(33, seed=1).bfloat16(), drawn(3, seed=2), drawn(8, 8, seed=3).mT]
    found = l2_norm(tensors, torch.float32, torch.device("cpu"))
    exact = torch.linalg.vector_norm(torch.cat([tensor.double().flatten() for tensor in tensors]))
    assert float(found) == pytest.approx(float(exact), rel=1e-6)
    assert amp_c.calls == ["l2norm", "l2norm"]  # float32 and bfloat16; the strided one is torch's


def test_scaling_and_accumulation(amp_c: AmpC) -> None:
    from hp_plugin.core.kernels import accumulate

    dst, src = drawn(65), drawn(65, seed=1).bfloat16()
    expected = dst + 0.5 * src.float()
    version = dst._version
    accumulate._device_accumulate_scaled(dst, src, 0.5)
    assert torch.equal(dst, expected)
    assert dst._version > version
    target, other = torch.zeros(65, dtype=torch.bfloat16), torch.zeros(65, dtype=torch.bfloat16)
    accumulate._device_scale_copy(target, dst, 0.25)
    scale_copy_reference(other, dst, 0.25)
    assert torch.equal(target, other)
    accumulate._device_scale_copy(torch.zeros(0), torch.zeros(0), 2.0)  # apex is not asked for nothing
    accumulate._device_scale_copy(torch.zeros(8, 8).mT, drawn(8, 8), 2.0)
    assert amp_c.calls == ["axpby", "scale"]


def test_adamw_of_several_ages(amp_c: AmpC) -> None:
    options = AdamOptions(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

    def shard(seed: int, steps: float) -> AdamShard:
        values = [drawn(4, 5, seed=seed + i) for i in range(3)]
        return AdamShard(*values, drawn(4, 5, seed=seed + 3).abs(), torch.tensor(steps))

    mine = [shard(0, 0.0), shard(10, 4.0), shard(20, 0.0)]
    exact = [AdamShard(*(tensor.double() for tensor in each)) for each in mine]
    narrow = mine[0]._replace(grad=mine[0].grad.bfloat16())
    assert fused_adamw([narrow], options) == [narrow]  # apex reads all four as one dtype
    assert fused_adamw(mine, options) == []
    assert amp_c.calls == ["adam", "adam"]  # one launch for each age
    for found, expected in zip(mine, exact):
        adamw_reference(expected, options)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_an_optimizer_and_clipping_run_on_it(amp_c: AmpC) -> None:
    weights = [drawn(6, 3).requires_grad_(), drawn(4, seed=1).requires_grad_()]
    theirs = [weight.detach().clone().requires_grad_() for weight in weights]
    mine, reference = HyperAdamW(weights, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(2):
        for index, (weight, other) in enumerate(zip(weights, theirs)):
            weight.grad = drawn(*weight.shape, seed=10 * step + index)
            other.grad = weight.grad.clone()
        clip_grad_norm_(weights, 0.5)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        mine.step()
        reference.step()
    torch.testing.assert_close(weights, theirs, rtol=1e-5, atol=1e-6)
    assert amp_c.calls == ["l2norm", "adam"] * 2
    assert [float(mine.state[weight]["step"]) for weight in weights] == [2.0, 2.0]


@pytest.mark.parametrize(("main", "operands"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_weight_gradients(amp_c: AmpC, main: torch.dtype, operands: torch.dtype) -> None:
    inputs, grads = drawn(9, 5).to(operands), drawn(9, 3, seed=1).to(operands)
    found = drawn(3, 5, seed=2).to(main)
    exact = found.double() + grads.double().T @ inputs.double()
    accumulate_weight_gradient_(found, inputs, grads)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2 if main == torch.bfloat16 else 1e-6, atol=1e-6)
    assert sys.modules["fused_weight_gradient_mlp_cuda"].calls == ["fp32" if main == torch.float32 else "fp16"]  # type: ignore[attr-defined]


def test_weight_gradients_of_the_wrong_shape_are_refused(amp_c: AmpC) -> None:
    with pytest.raises(ConfigurationError, match=r"needs \(outputs, inputs\)"):
        accumulate_weight_gradient_(torch.zeros(5, 3), drawn(9, 5), drawn(9, 3))


def test_an_apex_whose_extensions_do_not_load_is_refused_by_name(amp_c: AmpC, monkeypatch: pytest.MonkeyPatch) -> None:
    applier = sys.modules["apex.multi_tensor_apply"].multi_tensor_applier
    monkeypatch.setattr(type(applier), "available", False)
    with pytest.raises(ConfigurationError, match="take apex out of HP_KERNELS"):
        l2_norm([drawn(3)], torch.float32, torch.device("cpu"))
    monkeypatch.setattr(type(applier), "available", True)
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(ConfigurationError, match="its module amp_C does not import"):
        l2_norm([drawn(3)], torch.float32, torch.device("cpu"))
